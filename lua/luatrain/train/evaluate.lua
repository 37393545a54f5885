-- evaluate.lua - evaluates a net on a set; the part of run:evaluate that does not need the run.
--
-- Each sample of the set counts once, whatever the number of ranks: each rank evaluates its shards
-- of every batch. After each batch the ranks sum their results in the order of the shards, so the
-- sums are the same for any number of ranks.

local core = ...
local agree = require "luatrain.train.agree"
local check = require "luatrain.check"
local metrics = require "luatrain.api.metrics"
local module = require "luatrain.api.module"
local ranks = require "luatrain.train.ranks"
local ops = core.ops

local spec = check "run:evaluate{set:set; batch?, loss?:call, metrics?:metrics}"

-- Checks the arguments of run:evaluate and returns them as one table.
local function read(set, given)
  local all = {set = set}
  if given ~= nil and type(given) ~= "table" then
    core.fail("EINVAL", ("run:evaluate requires options as a table: run:evaluate(set, {batch = "
                         .. "256}), but got %s"):format(check.described(given)))
  end
  for key, value in pairs(given or {}) do all[key] = value end
  return spec(all)
end

-- Sets sums to the results of the batch x, y: the loss of its samples, then each metric.
local function add_batch(sums, net, o, x, y)
  local logits = net(x)
  local function number(value, ...)
    local words = table.pack(...)
    return o.mode:own(value, function(own)
      return check.number(own, table.unpack(words))
    end)
  end
  sums[1] = number(o.loss(logits, y), "run:evaluate: 'loss'", "the loss") * x:dim(1)
  for i, metric in ipairs(o.metrics) do
    sums[i + 1] = number(metric.count(logits, y), ("run:evaluate: metric '%s'"):format(metric.name),
                         "a count")
  end
end

-- Evaluates this rank's shards of a batch of `rows` samples. Returns a list with the sums of each
-- shard in turn, and zeros for shards that a small batch does not have.
local function evaluate_shards(pass, rows, amp, net, o)
  local list = {}
  for part = 1, core.shards(rows) do
    local _, count = core.shard(rows, part)
    local x, y = pass:next()
    local sums = {}
    core.step(core.autocast, amp, core.no_grad, add_batch, sums, net, o, x, y)
    for _, sum in ipairs(sums) do
      list[#list + 1] = count > 0 and sum or 0.0           -- an empty shard has a sample of padding
    end
  end
  for i = #list + 1, core.shards() * (1 + #o.metrics) do list[i] = 0.0 end
  return list
end

-- Returns the loss and the metrics by name, {loss = , top1 = }, of net in eval mode. given: the
-- options of run:evaluate; like: the run's mode, loss, batch, amp and image size, and whether a
-- stop must wait. If neither has a loss, computes cross entropy; like.other_loss: names it
-- cross_entropy instead of loss, because the training has another loss. Calls stop(reason, waits)
-- after each batch, with the signal by which a stop was requested on any rank, or false, and
-- whether it must wait for any rank. Restores the net's mode, even after an error.
return function(net, set, given, like, stop)
  local o = read(set, given)
  o.mode, o.loss = like.mode, o.loss or like.loss
  o.metrics = metrics.read(o.metrics, "run:evaluate")
  local loss_name = not o.loss and like.other_loss and "cross_entropy" or "loss"
  o.loss = o.loss or ops.cross_entropy
  agree.set("an evaluation", set)
  set = set:sized(like.size)
  local _ <close> = setmetatable({}, {__close = module.save_modes(net)})
  net:eval()
  local batch = o.batch or like.batch
  local pass <close> = set:open_batches{batch = batch, shard = true}
  local n, totals = 1 + #o.metrics, {}
  for i = 1, n do totals[i] = 0.0 end
  for done = 0, #set - 1, batch do
    local list = evaluate_shards(pass, math.min(batch, #set - done), like.amp, net, o)
    local _, signal = core.stop_reason()
    local signals, ranks_stop, waits = core.sum("an evaluation", signal or 0, signal and 1 or 0,
                                                like.stop_waits and 1 or 0)
    for i, sum in ipairs(ranks.gather("an evaluation", list)) do
      totals[(i - 1) % n + 1] = totals[(i - 1) % n + 1] + sum
    end
    stop(ranks_stop > 0 and core.stop_reason(math.tointeger(signals // ranks_stop)), waits > 0)
  end
  local result = {[loss_name] = totals[1] / #set}
  for i, metric in ipairs(o.metrics) do result[metric.name] = totals[i + 1] / #set end
  return result
end
