-- evaluate.lua - evaluates a net on a set; the part of run:evaluate that does not need the run.
--
-- Each sample of the set counts once, whatever the number of ranks: each rank evaluates its shards
-- of every batch. After each batch the ranks sum their results in the order of the shards.

local core = ...
local agree = require "luatrain.train.agree"
local check = require "luatrain.check"
local module = require "luatrain.api.module"
local ranks = require "luatrain.train.ranks"
local ops = core.ops

local spec = check "run.evaluate{set:set; batch?, loss?:call}"

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

-- Returns the number of correct predictions and the sum of the losses of the samples in x, y.
local function evaluate_batch(net, loss, x, y)
  local logits = net(x)
  local lost = check.number(loss(logits, y), "run:evaluate: 'loss'")
  return ops.eq(ops.argmax(logits, 2), y):sum():item(), lost * x:dim(1)
end

-- Evaluates this rank's shards of a batch of `rows` samples. Returns the number of correct
-- predictions, and a list of the summed loss of each shard.
local function evaluate_shards(pass, rows, amp, net, loss)
  local hits, losses = 0, {}
  for part = 1, core.shards() do
    local _, count = core.shard(rows, part)
    local x, y = pass:next()
    local right, lost = core.step(core.autocast, amp, core.no_grad, evaluate_batch, net, loss, x, y)
    if count == 0 then right, lost = 0, 0.0 end
    hits, losses[part] = hits + right, lost
  end
  return hits, losses
end

-- Returns {top1 = , loss = } of net in eval mode. given: the options of run:evaluate; like: the
-- run's batch, amp and image size. Calls stop(reason) after each batch, with the signal by which a
-- stop was requested on any rank, or false. Restores the net's mode, also after an error.
return function(net, set, given, like, stop)
  local o = read(set, given)
  agree.set("an evaluation", set)
  set = set:sized(like.size)
  local _ <close> = setmetatable({}, {__close = module.keep_modes(net)})
  net:eval()
  local batch = o.batch or like.batch
  local pass <close> = set:open_batches{batch = batch, shard = true}
  local hits, lost = 0, 0.0
  for done = 0, #set - 1, batch do
    local right, losses = evaluate_shards(pass, math.min(batch, #set - done), like.amp, net,
                                       o.loss or ops.cross_entropy)
    local _, signal = core.stop_reason()
    local all, signals, ranks_stop = core.sum("an evaluation", right, signal or 0,
                                              signal and 1 or 0)
    hits, lost = hits + all, lost + ranks.sum_shards("an evaluation", losses)
    stop(ranks_stop > 0 and core.stop_reason(math.tointeger(signals // ranks_stop)))
  end
  return {top1 = hits / #set, loss = lost / #set}
end
