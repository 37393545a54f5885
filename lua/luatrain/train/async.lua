-- async.lua - asynchronous training of a run: --parallel async=RULE. Each rank is a worker, and
-- rank 0 also runs the server. With --simulate, one process computes for all workers, one after the
-- other, under a virtual clock.
--
-- A ticket is the number of a batch in the run, from 0: the batches of the first epoch, then those
-- of the second, and so on. A worker pulls a ticket, computes its gradient from the weights of that
-- moment, and pushes it; a push is one step. An epoch ends when each of its tickets is applied. By
-- then other workers may have begun with tickets of the next epoch, so run:batches() of rank 0 also
-- yields batches of that epoch. On the other ranks, an epoch ends with their first ticket of the
-- next one. Only rank 0 evaluates, reports, saves and stops. At the end of the run, all ranks get
-- the final weights. mode.lua describes the methods that each kind of training has.

local core = ...
local ending = require "luatrain.train.ending"
local exits = require "luatrain.train.exits"
local deferred = require "luatrain.api.deferred"
local Mode = require "luatrain.train.mode"
local read_options = require "luatrain.train.parallel".async
local progress = require "luatrain.train.progress"
local sorted = require "luatrain.keys"
local phases = require "luatrain.train.phases"
local state = require "luatrain.train.state"
local report = require "luatrain.train.async_report"
local trace = require "luatrain.train.async_trace"

-- running: the folder of the run that trains asynchronously, or false; end_pass: ends the pass of
-- async_loop.lua that trains asynchronously, or false
local async = {running = false, end_pass = false}
local Async = setmetatable({
  name = "asynchronous", is_sharded = false, has_fixed_batch = true,
  print_start = report.print_start, report = report.finish,
}, Mode)
Async.__index = Async

local PREFETCH = 2         -- tickets of a live worker: one to compute, one to prepare
local lost = false         -- on rank 0: a rank that was lost in this process
local has_run = false      -- whether a job that workers join has begun its run
local function refuse(...) core.fail("EUSAGE", string.format(...)) end

function exits.is_server()
  local rank, size = core.job_rank()
  return rank == 0 and size > 1 and (async.running or async.end_pass) and true or false
end

-- The mode of a run with settings `run`, or nil if it does not train asynchronously.
function async.of(run)
  local o = read_options()
  if not o then return nil end
  if async.end_pass then async.end_pass "lt.run: " end
  if async.running then
    refuse("lt.run: this script has an asynchronous run in %s that is not closed, and there can be "
           .. "only one at a time: write local run <close> = lt.run{...}", async.running)
  elseif has_run then
    refuse "lt.run: a job that workers join (--serve) has one run, but this is another"
  elseif #run.optims > 1 then
    core.fail("EINVAL", ("lt.run: asynchronous training supports one optimizer, but 'optim' has %d")
                        :format(#run.optims))
  elseif run.amp == "auto" then
    refuse "amp = auto cannot be combined with --parallel; choose off, bf16 or fp16"
  elseif run.check_sync then
    refuse "--check-sync cannot be combined with --parallel"
  elseif lost then
    core.fail("EPEER", ("rank %d was lost in an earlier run; a further run requires all ranks")
                       :format(lost))
  elseif o.trace and run.amp == "fp16" then
    refuse("--simulate trace:FILE cannot be combined with amp fp16: each worker of a run has a "
           .. "loss scale of its own")
  end
  has_run = core.is_elastic()
  o.text = o.lam and ("%s,lam=%.14g"):format(o.rule, o.lam) or o.rule
  if o.trace then o.trace_steps, o.trace_workers, o.trace_losses = trace.read(o, run) end
  return setmetatable({options = o, is_replay = o.trace ~= nil}, Async)
end

-- ==== Tickets ====================================================================================

local function restore(self, saved, warnings)
  local names, tensors = {}, {}
  for i, name in ipairs(sorted(saved.tensors)) do
    names[i], tensors[i] = name, saved.tensors[name]
  end
  local fresh = self.handle:restore(names, tensors)
  for name, value in pairs(saved.numbers) do
    local sum, epoch = name:match "^(%l+)%.(%d+)$"
    if sum then self[sum][tonumber(epoch)] = value else self[name] = value end
  end
  if fresh > 0 then
    warnings[#warnings + 1] = ("the checkpoint lacks %d of the tensors of asynchronous training, "
                               .. "which start at zero; it had another rule or fewer workers")
                              :format(fresh)
  end
end

-- EUSAGE if workers of the saved run already got more batches than this run has.
local function check_issued(self, saved)
  local order, epochs = saved.tensors.order, self.run.settings.epochs
  local issued, has = order and core.async_issued(order) or -1, self.first[epochs + 1]
  if issued <= has then return end
  refuse("the run cannot resume at step %d with epochs = %d, which are %d steps: its workers have "
         .. "already begun %d; raise epochs", self.run.steps, epochs, has, issued)
end

-- For a simulation, which has only the newest weights: EUSAGE if the epoch must still be evaluated,
-- and the run on ranks that saved the checkpoint has trained since its end.
local function check_kept(self, saved)
  local run, ticket = self.run, self.first[self.run.epoch + 1]
  if self.is_live or not ticket or not saved.tensors["kept/" .. ticket]
     or self.ended[run.epoch] == run.steps then
    return
  end
  refuse("the run cannot resume at step %d with --simulate: epoch %d has ended but was not "
         .. "evaluated, and a simulation has only the newest weights; resume with ranks (--ranks N "
         .. "or mpirun)", run.steps, run.epoch)
end

-- The buffers of a net.
function async.buffers_of(net)
  local list, _, tensors = {}, net:state()
  for _, tensor in ipairs(tensors) do
    if core.role(tensor) == "buffer" then list[#list + 1] = tensor end
  end
  return list
end

-- Starts asynchronous training of an optimizer (see core.inner_of), with the options o. buffers: of
-- its net; gone: list of the ranks that were lost before.
function async.open(inner, buffers, o, gone)
  core.count_pending(inner)
  if inner.has_loaded_slots and (o.rule == "ddc" or o.rule == "dana") then
    refuse("%swith --parallel async=%s, each worker has a velocity of its own, so the one that "
           .. "optim:load has loaded would not be used; choose another rule", core.where(), o.rule)
  end
  o.steps, o.prefetch = inner.steps, PREFETCH
  if o.trace then return core.replay(inner.handle, o, buffers, o.trace_workers, o.trace_steps) end
  if o.workers then return core.simulate(inner.handle, o, buffers) end
  return core.live(inner.handle, o, buffers, gone)
end

-- How far a ticket may be above the lowest unfinished one: an epoch, so that one slow worker
-- does not let the others train to the end of the run.
local function max_lead_of(self)
  local steps = 2 * PREFETCH * self.workers
  for epoch = 1, self.run.settings.epochs do
    steps = math.max(steps, self.first[epoch + 1] - self.first[epoch])
  end
  return steps
end

-- saved: {tensors = , numbers = } of the checkpoint, by name.
function Async:open(saved, warnings)
  local run, o = self.run, self.options
  for name, value in pairs{
    samples = 0,                       -- samples that were applied or skipped
    first = {0},                       -- first ticket of each epoch, and the end of the last one
    pushes = {},                       -- ticket -> values that its push will log
    ticket = false, epoch = 1, place = 0, rows = 0,      -- the batch that is computed
    stream = false, stream_epoch = 0, stream_next = 0,   -- a pass, its epoch and next position
    loss = {}, done = {},              -- per epoch: sum of the loss over its samples; their number
    ended = {}, seen = {},             -- per epoch: run.steps and samples when it ended
    skipped = 0, dropped = 0, total_delay = 0, largest_delay = 0,
    delays = {},                       -- numbers of steps by delay: see async_report.lua
    rule = o.rule, text = o.text,      -- name of the rule; with lam, if it was given
    workers = o.trace_workers or o.workers or run.ranks,
    began = core.clock(), first_step = 0,  -- start of this process
    first_time = false, time = 0.0,    -- simulation: virtual times of its start and last step
    is_live = not o.workers and not o.trace,
    trace_losses = o.trace_losses or {},   -- replay: losses by step, until one differs
    pushed = core.clock(),             -- time at which the last push arrived
    done_below = 0,                    -- all tickets below it are done
    pending = false,                   -- ranks other than 0: a grant of a ticket of the next epoch
    passes = {}, requested = {},       -- live: passes by epoch; epochs of requested tickets
    read_back = 0,                     -- live: the last epoch whose final values the net got
    sha256 = false,                    -- digest of the net at the end of the epoch
    asked = false,                     -- this rank has asked rank 0 to stop
    is_elastic = core.is_elastic(), left = false,  -- workers join and leave; this worker has left
    present = 1,                       -- elastic: the number of ranks, with the server
    handle = false, inner = core.inner_of(run.settings.optim),
  } do self[name] = value end
  local images, epochs = #run.settings.train, run.settings.epochs
  for epoch = 1, epochs do
    local batch = phases.at(run.settings.phases, epoch).batch
    self.first[epoch + 1] = self.first[epoch] + (images + batch - 1) // batch
  end
  core.set_step(0, 0)                  -- random numbers depend on the ticket
  if saved then check_issued(self, saved) end
  o.max_lead = max_lead_of(self)
  if saved then self.inner.has_loaded_slots = false end    -- the run has loaded them
  self.handle = async.open(self.inner, async.buffers_of(run.settings.net), o)
  if saved then
    restore(self, saved, warnings)
    check_kept(self, saved)
  end
  self.done_below = self.handle:done_below()
  self.first_step = run.steps
  local max_steps = run.settings.max_steps
  if max_steps then self.handle:stop_at(max_steps, 0) end
  for epoch = run.epoch, epochs do self.handle:snapshot_at(self.first[epoch + 1]) end
  async.running = run.folder
end

function Async:is_alone() return true end

function Async:add_start_fields(fields)
  if self.is_elastic then fields.ranks = 1 else fields.workers = self.workers end
  fields.rule = self.text
end

function Async:add_state(names, tensors)
  local own, values = self.handle:state()
  for i, name in ipairs(own) do
    names[#names + 1], tensors[#tensors + 1] = "async." .. name, values[i]
  end
end

function Async:numbers()
  local list = {samples = self.samples, skipped = self.skipped, dropped = self.dropped,
                total_delay = self.total_delay, largest_delay = self.largest_delay}
  for bin, count in pairs(self.delays) do list["delays." .. bin] = count end
  for _, name in ipairs{"loss", "done", "ended", "seen"} do
    for epoch, value in pairs(self[name]) do
      if epoch >= self.run.epoch then list[name .. "." .. epoch] = value end
    end
  end
  return list
end

-- Finds the batch of a ticket: its epoch, the position of its first sample, and its samples.
local function locate(self, ticket)
  local epoch = self.epoch
  while ticket >= self.first[epoch + 1] do epoch = epoch + 1 end
  while ticket < self.first[epoch] do epoch = epoch - 1 end
  local batch = phases.at(self.run.settings.phases, epoch).batch
  local position = (ticket - self.first[epoch]) * batch
  return epoch, position, math.min(batch, #self.run.settings.train - position)
end

-- The pass over an epoch from which a worker requests batches.
local function pass_of(self, open_pass, epoch)
  local pass = self.passes[epoch] or open_pass(self.run, epoch, 0, self.run.settings.workers, true)
  self.passes[epoch] = pass
  return pass
end

local function request(self, open_pass, ticket)
  if self.requested[ticket] then return end
  local epoch, position = locate(self, ticket)
  pass_of(self, open_pass, epoch):request(position)
  self.requested[ticket] = epoch
end

-- The batch of a ticket in a live run. Requests those of the prefetched tickets, which this worker
-- will compute next.
local function requested_batch(self, open_pass, ticket, prefetched)
  request(self, open_pass, ticket)
  local own = self.requested[ticket]
  local x, y = pass_of(self, open_pass, own):next()
  self.requested[ticket] = nil
  local used = {[own] = true}
  for _, other in ipairs(prefetched) do request(self, open_pass, other) end
  for _, epoch in pairs(self.requested) do used[epoch] = true end
  for epoch, pass in pairs(self.passes) do
    if not used[epoch] then
      pass:close()
      self.passes[epoch] = nil
    end
  end
  return x, y
end

-- The batch at a position in a simulation. Tickets mostly come in order, so one pass yields them; a
-- ticket that was dropped and is issued again gets a pass of its own.
local function batch_at(self, open_pass, epoch, position, rows)
  local workers = self.run.settings.workers
  if epoch == self.stream_epoch and position == self.stream_next then
    self.stream_next = position + rows
    return self.stream:next()
  end
  local is_later = epoch > self.stream_epoch
                   or epoch == self.stream_epoch and position > self.stream_next
  local pass = open_pass(self.run, epoch, position, is_later and workers or 0)
  local x, y = pass:next()
  if is_later then
    if self.stream then self.stream:close() end
    self.stream, self.stream_epoch, self.stream_next = pass, epoch, position + rows
  else
    pass:close()
  end
  return x, y
end

-- ==== Pushes =====================================================================================

-- Sets the run's sums to those of its current epoch.
local function show_epoch(self)
  local run = self.run
  run.done, run.loss_sum = self.done[run.epoch] or 0, self.loss[run.epoch] or 0.0
end

-- The log values of a step that another rank has computed.
local function step_of_other(self, ticket, rate)
  local epoch, _, rows = locate(self, ticket)
  return {rows = rows, rate = rate, epoch = epoch, waited = 0.0,
          spent = {inside = 0.0, backward = 0.0, optimizer = 0.0, sent = 0, total = false}}
end

-- For each epoch that the last push has ended, stores the numbers of steps and samples.
local function note_ends(self)
  local epoch = self.run.epoch
  while self.first[epoch + 1] and self.done_below >= self.first[epoch + 1] do
    self.ended[epoch] = self.ended[epoch] or self.run.steps
    self.seen[epoch] = self.seen[epoch] or self.samples
    epoch = epoch + 1
  end
end

-- In a replay, warns of the first step with another loss than in the trace.
local function compare_loss(self, step, loss)
  local was = self.trace_losses[step]
  if not was or math.abs(loss - was) <= 1e-5 * math.abs(was) then return end
  self.trace_losses = {}
  self.run.log:warn(("step %d has the loss %.6g, but in the trace it has %.6g: the replay differs "
                     .. "from the run. What a script changes between epochs, such as a learning "
                     .. "rate, each rank of a run changes at another step; use a schedule")
                    :format(step, loss, was))
end

-- Records a push: one step, unless it was dropped.
local function take_push(self, event)
  local run, ticket, loss, time = self.run, event.ticket, event.loss, event.time
  local step, now = self.pushes[ticket] or step_of_other(self, ticket, event.lr), core.clock()
  self.done_below = event.done_below
  self.time = time
  if self.is_live then                 -- the rate of all workers together
    step.seconds, self.pushed = math.max(now - self.pushed, 1e-9), now
    time = time - run.began
    run.epoch_s, run.epoch_images = run.epoch_s + step.seconds, run.epoch_images + step.rows
  end
  self.pushes[ticket] = nil
  if event.dropped then
    self.dropped = self.dropped + 1
    return
  end
  self.samples = self.samples + step.rows
  self.done[step.epoch] = (self.done[step.epoch] or 0) + step.rows
  self.loss[step.epoch] = (self.loss[step.epoch] or 0.0) + loss * step.rows
  show_epoch(self)
  run.saved = false
  run.steps = event.applied or run.steps
  note_ends(self)
  if not event.applied then
    self.skipped = self.skipped + 1
    return
  end
  report.count_delay(self, event.delay)
  deferred.check_finite(loss, run.steps)
  compare_loss(self, run.steps, loss)
  step.loss, step.worker, step.ticket = loss, event.worker, ticket
  step.delay, step.time = event.delay, time
  progress.record(run, step)
end

-- Whether all tickets of the run's epoch are done.
local function is_over(self) return self.done_below >= self.first[self.run.epoch + 1] end

-- Begins the batch of a ticket, and returns it.
local function begin(self, open_pass, event)
  local run, before, ticket = self.run, core.clock(), event.ticket
  local epoch, position, rows = locate(self, ticket)
  local x, y
  self.first_time = self.first_time or event.time
  if self.is_live then
    x, y = requested_batch(self, open_pass, ticket, event.prefetched)
  else
    x, y = batch_at(self, open_pass, epoch, position, rows)
  end
  self.ticket, self.epoch, self.place, self.rows = ticket, epoch, position, rows
  run.shard, run.waited = 1, core.clock() - before
  run.rows, run.counter = rows, core.steps()
  return x, y
end

-- A worker was lost or has joined.
local function take_change(self, event)
  if event.kind == "lost" then lost = event.worker end
  report.change(self, event)
end

-- Another rank got a signal.
local function take_stop_request(self, signal)
  if not self.run.stop then self.run.stop = core.stop_reason(signal) end
end

-- Gives the tickets of this rank back, and drops the batches that were requested for them.
local function release(self)
  self.handle:release()
  for _, pass in pairs(self.passes) do pass:close() end
  self.passes, self.requested = {}, {}
end

-- At the end of the epoch, the script may write to the net, for example to evaluate an average of
-- its weights, if it restores the values before it reports or continues. Accepts such writes.
local function accept_restored(self)
  if not self.sha256 then return end
  if self.handle:is_written() and self.run.settings.net:sha256() == self.sha256 then
    self.handle:accept_writes()
  end
  self.sha256 = false
end

-- Workers may be ahead of the epoch, so its batches end when its last ticket is done.
function Async:has_batches() return true end

-- stop_if_wanted(run) ends the run if it must stop; stopped(run, code, why) ends it because rank 0
-- has stopped it, or a trace has ended.
function Async:batches(open_pass, _, stop_if_wanted, stopped)
  local run = self.run
  local function next_batch()
    local _, signal = self:follows()
    if signal and self.is_elastic then
      self.left = true
      stopped(run, 75, ("this worker has left the job after %s; the job continues")
                       :format(core.stop_reason(signal)))
    end
    local event = self.pending or self.handle:next()
    local kind, worker = event.kind, event.worker
    self.pending = false
    if kind == "push" then
      take_push(self, event)
      stop_if_wanted(run)
      ending.save_if_due(run)
      stop_if_wanted(run)              -- saving may have recorded further pushes
      if is_over(self) then return nil end
    elseif kind == "lost" or kind == "joined" then
      take_change(self, event)
    elseif kind == "stop" then
      if worker > 0 then take_stop_request(self, event.code) end
      if run.root then stop_if_wanted(run) end
      if worker == 0 then stopped(run, event.code, "stopped by rank 0") end
    elseif kind == "done" then
      if self.is_replay and not is_over(self) then
        stopped(run, 0, ("the trace ends at step %d"):format(run.steps))
      end
      return nil
    elseif run.root or locate(self, event.ticket) <= run.epoch then
      return begin(self, open_pass, event)
    else
      self.pending = event
      return nil
    end
    return next_batch()
  end
  accept_restored(self)
  self.handle:set_limit(self.first[#self.first])     -- the first call begins the training
  return function()
    if run.status == "over" then core.fail("EINVAL", "run:batches: this run is over") end
    if run.rows then
      core.fail("EINVAL", "run:batches: the previous batch had no run:step")
    end
    show_epoch(self)
    local x, y
    if not (run.root and is_over(self)) then x, y = next_batch() end
    if x then return x, y end
    if run.root then self:read_epoch() end
    self.sha256 = run.settings.net:sha256()
    run.mark_of_state = state.mark(run)
  end
end

-- Rank 0: gives the net the values from the end of the run's epoch, to be evaluated.
function Async:read_epoch()
  local epoch = self.run.epoch
  if self.read_back == epoch then return end
  self.read_back = epoch
  if self.is_live then release(self) end
  self.handle:load_snapshot(self.first[epoch + 1])
end

-- Gives the net the newest values of the server, to be evaluated during an epoch.
function Async:begin_evaluation(given)
  local run = self.run
  if not run.root then return report.no_result(given) end
  if self.is_live and run.status == "epoch" and not run.rows and not is_over(self) then
    self.handle:read()
  end
end

function Async:leave_loop()
  if self.is_live and self.run.rows then release(self) end
end

function Async:check_report()
  if self.run.root and not is_over(self) then
    refuse("%srun:report: epoch %d is not over; with --parallel async=RULE, a loop over "
           .. "run:batches() must not end early", core.where(), self.run.epoch)
  end
end

-- Ranks other than 0 follow. If such a process got a signal, asks rank 0 to stop all ranks, unless
-- the job is elastic: then only this worker leaves. Also returns the signal.
function Async:follows()
  if self.run.root then return false end
  local _, signal = core.stop_reason()
  if signal and not self.asked and not self.is_elastic then self.handle:stop(signal) end
  self.asked = self.asked or signal ~= nil
  return true, signal
end

function Async:refuse_optimizer()
  core.fail("EINVAL", "run:step: asynchronous training supports one optimizer; this is another")
end

-- Each batch belongs to one rank.
function Async:division() return 1 end
function Async:sent() return nil end

-- Ranks have the same weights only at the end.
function Async:weights_text() return nil end

-- The numbers of steps and samples when the run's epoch ended. Other ranks may have trained since.
function Async:end_of_epoch()
  local run = self.run
  return self.ended[run.epoch] or run.steps, self.seen[run.epoch] or self.samples
end

function Async:samples_seen() return self.samples end

function Async:check_saved() state.check_weights(self.run) end

-- Rank 0: the run's epoch is reported, so its final values are no longer saved.
function Async:forget_epoch() self.handle:free_snapshot(self.first[self.run.epoch + 1]) end

-- Calls fn(...) while the server is suspended, the net and the optimizer have its current values,
-- and all steps so far are recorded, to save a checkpoint. Returns what fn returns. If the net had
-- the final values of the epoch, to be evaluated, it gets them back.
function Async:suspended(fn, ...)
  local handle, run = self.handle, self.run
  accept_restored(self)
  local _ <close> = setmetatable({}, {__close = function()
    handle:pause(false)
    if run.status == "epoch" and self.read_back == run.epoch then
      handle:load_snapshot(self.first[run.epoch + 1])
    end
  end})
  handle:pause(true)
  for event in handle.poll, handle do
    if event.kind == "push" then
      take_push(self, event)
    elseif event.kind == "stop" then
      take_stop_request(self, event.code)
    else
      take_change(self, event)
    end
  end
  handle:read()
  self.inner.steps = handle:steps()
  return fn(...)
end

function Async:stop(code) self.handle:stop(code) end

function Async:position() return (self.epoch - 1) * #self.run.settings.train + self.place end

-- If no further push is skipped.
function Async:last_step() return self.first[#self.first] - self.skipped end

-- The step is recorded when its push arrives.
function Async:end_step(loss)
  local run = self.run
  local total = core.clock() - run.mark
  run.rows = false
  run.mark = run.mark + total
  if not self.is_live then
    run.epoch_s, run.epoch_images = run.epoch_s + total, run.epoch_images + self.rows
  end
  run.spent.total, run.spent.sent = total, 0
  if run.root then
    self.pushes[self.ticket] = {rows = self.rows, rate = run.rate, waited = run.waited,
                                spent = run.spent, epoch = self.epoch,
                                scaled = run.settings.scaler and run.settings.scaler:latest()}
  end
  loss = deferred.number(loss)
  self.handle:push(run.rate)
  return loss
end

-- Unless this rank has failed, all ranks get the final weights.
function Async:close(failed)
  if self.stream then self.stream:close() end
  for _, pass in pairs(self.passes) do pass:close() end
  self.stream, self.passes, async.running = false, {}, false
  local handle = self.handle
  local _ <close> = setmetatable({}, {__close = function() handle:close() end})
  if failed or self.left then return end
  accept_restored(self)
  handle:finish()
  self.inner.steps = handle:steps()
  core.set_step(self.first[#self.first])       -- the same on all ranks
end

return async
