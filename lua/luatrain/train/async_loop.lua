-- async_loop.lua - asynchronous training in a loop without lt.run:
--
--   for epoch = 1, 5 do
--     for x, y in train:batches{batch = 64, shuffle = true, epoch = epoch} do
--       lt.step(function() ... loss:backward() sgd:step() end)
--     end
--   end
--
-- Each pass over shuffled batches trains asynchronously. Its batches are the tickets, and each one
-- is applied once. At the end of a pass the ranks wait for each other, and all have the weights of
-- the server. Between passes they are ordinary ranks.

local core = ...
local async = require "luatrain.train.async"
local hooks = require "luatrain.hooks"
local is_module = require "luatrain.api.module".is_module
local ranks = require "luatrain.train.ranks"
local report = require "luatrain.train.async_report"
local server_mode = require "luatrain.train.server_mode"
local read_options = require "luatrain.train.parallel".async
local read_server = require "luatrain.train.parallel".server

local loop = {}

local newest = setmetatable({}, {__mode = "v"})          -- {optim = the newest optimizer}
local buffers = setmetatable({}, {__mode = "k"})         -- optimizer -> buffers of its net
local first = 0                        -- first ticket of the pass
local names, tensors = {}, {}          -- on rank 0: state of the server between passes
local of                               -- the optimizer to which the state belongs
local lost = {}                        -- on rank 0: ranks that were lost
local active = false                   -- the pass that has begun; false if there is none

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

-- Whether passes over shuffled batches train asynchronously: outside of a run, with --parallel.
function hooks.is_async()
  server_mode.check_loop()
  return read_options() and not async.running
end

-- The buffers of the modules that an optimizer was made for: a net, or groups with nets.
local function buffers_of(what)
  if is_module(what) then return async.buffers_of(what) end
  local list, known = {}, {}
  for _, group in ipairs(what) do
    local net = type(group) == "table" and group.params
    for _, buffer in ipairs(is_module(net) and async.buffers_of(net) or {}) do
      if not known[buffer] then list[#list + 1], known[buffer] = buffer, true end
    end
  end
  return list
end

-- A new optimizer trains with all ranks. With --parallel async=RULE, its steps are asynchronous.
function hooks.new_optim(inner, what, who, of_optim)
  ranks.reduce(inner.parameters, who, of_optim)
  local settings = read_options()
  read_server()                        -- refuses wrong options
  if settings then core.needs_async(settings.rule) end
  newest.optim, buffers[inner] = inner, settings and buffers_of(what)
end

local function warn(text) io.stderr:write("luatrain: warning: ", text, "\n") end

-- Ends the pass that has begun, if there is one. Called at the end of a pass, before another one or
-- a run, and by loop.end_script(). EUSAGE if its batches are not done. who: a prefix, or nil.
function loop.finish(who)
  local pass = active
  if not pass then return end
  active, async.end_pass = false, false
  local is_root = core.rank() == 0
  local left = is_root and pass.last - pass.handle:done_below() or 0
  pass.data:close()
  local _ <close> = setmetatable({}, {__close = function() pass.handle:close() end})
  if left > 0 then
    refuse("%s%s%d batch%s of the pass over the training set %s not done; with --parallel "
           .. "async=RULE, a loop over batches must not end early, and nothing else can train "
           .. "before it ends",
           pass.line, who or "", left, left == 1 and "" or "es", left == 1 and "is" or "are")
  end
  if is_root then names, tensors = pass.handle:state() end
  of = pass.optim
  pass.handle:finish()
  pass.optim.steps = pass.handle:steps()
  first = pass.last
  core.set_step(first)                 -- the same on all ranks
end

-- Called when the script has ended. Raises an error if it has left a batch or a pass early.
function loop.end_script()
  loop.finish()
  core.end_script()
end

-- If the optimizer is not the one of the last pass, keeps only the tickets of the server's state.
local function forget_others(optim)
  if optim == of then return end
  local own, values = {}, {}
  for i, name in ipairs(names) do
    if name == "order" or name == "numbers" then
      own[#own + 1], values[#values + 1] = name, tensors[i]
    end
  end
  names, tensors = own, values
end

local function open(settings)
  local optim = newest.optim
  if not optim then
    refuse "with --parallel, make the optimizer before the loop over shuffled batches"
  elseif core.is_elastic() then
    refuse("%sworkers can join (--serve) only a run of lt.run or lt.fit, but this is a loop over "
           .. "shuffled batches without one", core.where())
  elseif settings.trace then
    refuse "--simulate trace:FILE requires lt.run or lt.fit, which write a trace"
  end
  return async.open(optim, buffers[optim], settings, lost)
end

-- The iterator of set:batches(o) for training. open_batches(set, o) opens a pass over the data.
function hooks.batches(set, o, open_batches)
  local settings = read_options()
  loop.finish()
  local handle = open(settings)
  forget_others(newest.optim)
  local count = (set.count - o.first + o.batch - 1) // o.batch
  local skipped = o.first              -- images at the beginning of the epoch
  o.on_request, o.first, o.shard = true, 0, false
  active = {handle = handle, data = open_batches(set, o), last = first + count,
            optim = newest.optim, line = core.where()}
  async.end_pass = loop.finish
  core.set_step(first, core.random_step())
  if core.rank() == 0 and #names > 0 then handle:restore(names, tensors) end
  handle:set_limit(active.last)
  local pass, requested = active, {}
  local function request(ticket)
    if not requested[ticket] then pass.data:request(skipped + (ticket - first) * o.batch) end
    requested[ticket] = true
  end
  local function take(event)
    if event.kind == "compute" then
      request(event.ticket)
      for _, ticket in ipairs(event.prefetched) do request(ticket) end
      requested[event.ticket] = nil
      local x, y = pass.data:next()
      core.take_shard(x:dim(1), 1, o.grain)
      return x, y
    elseif event.kind == "lost" then
      lost[#lost + 1] = event.worker
      warn(report.loss_text(event))
    elseif event.kind ~= "push" then
      return loop.finish()
    end
    return take(handle:next())
  end
  return function()
    if active ~= pass then core.fail("EINVAL", "batches: another pass has begun") end
    return take(handle:next())
  end
end

return loop
