-- mode.lua - how the ranks of a run train together. run.lua and its helpers call the methods of
-- run.mode wherever the modes differ. This class is synchronous training on one rank or several.
-- The classes in async.lua and pipeline_mode.lua inherit from it.

local core = ...
local agree = require "luatrain.train.agree"
local deferred = require "luatrain.api.deferred"
local ending = require "luatrain.train.ending"
local lone_rows = require "luatrain.train.lone_rows"
local phases = require "luatrain.train.phases"
local ranks = require "luatrain.train.ranks"
local state = require "luatrain.train.state"

local Mode = {
  run = false,                   -- the run, once it exists
  name = "synchronous",
  parts = "shards",              -- what this rank divides its part of a batch into
  is_sharded = true,             -- whether the ranks share each batch
  has_fixed_batch = false,       -- whether a resumed run cannot change the batch size
  is_replay = false,             -- whether it replays a trace; no run can resume from that
  delay = 0,                     -- steps by which sums of gradients are applied late: 0 or 1
}
Mode.__index = Mode

-- The mode of a run with settings o. Other modes have one that returns nil if it does not apply.
function Mode.of() return setmetatable({}, Mode) end

-- ==== Beginning and end of a run =================================================================

-- Whether this rank computes the loss of a batch, and decides when to stop, without the others.
function Mode:is_alone()
  local _, size = core.rank()
  return size == 1 and core.shards() == 1
end

-- Starts the training. saved: what a checkpoint has of the mode, from which the run resumes, or
-- nil. Appends warnings.
function Mode:open() end

-- Adds fields to the event "start".
function Mode:add_start_fields() end

-- On rank 0: what the log prints after the event "start".
function Mode:print_start() end

-- On rank 0, at the end of a run: what the log reports. exit: see ending.finish.
function Mode:report() end

-- Ends the training; failed: with an error.
function Mode:close() end

-- Whether this rank can compute the digest of the final weights; failed: the run has failed.
function Mode:has_weights() return self.run.root end

-- ==== The loop ===================================================================================

-- Whether the epoch has batches left.
function Mode:has_batches() return self.run.done < #self.run.settings.train end

-- Opens the pass over the training set again after the shares of the ranks have changed.
local function open_again(run, loader, open_pass)
  loader:close()
  lone_rows.watch(run)
  return open_pass(run, run.epoch, run.done, run.settings.workers)
end

-- The iterator of run:batches(). open_pass(run, epoch, first, workers) opens a pass over an epoch;
-- settle(run) saves and stops if due after a step. Further arguments: see Async:batches().
function Mode:batches(open_pass, settle)
  local run = self.run
  local o, phase = run.settings, run.phase
  local loader, shares = open_pass(run, run.epoch, run.done, o.workers), core.share_changes()
  run.loader, run.shard = loader, run.shards
  return function()
    if run.status == "over" then core.fail("EINVAL", "run:batches: this run is over") end
    if run.loader ~= loader then
      core.fail("EINVAL", "run:batches: another loop over the batches was started")
    end
    if run.rows then core.fail("EINVAL", "run:batches: the previous batch had no run:step") end
    settle(run)
    local before = core.clock()
    if shares ~= core.share_changes() then
      loader, shares = open_again(run, loader, open_pass), core.share_changes()
      run.loader = loader
    end
    local x, y = loader:next()
    core.trace("wait for data", before)
    if run.shard == run.shards then run.shard, run.waited = 0, 0.0 end
    run.shard, run.waited = run.shard + 1, run.waited + (core.clock() - before)
    if not x then
      run.mark_of_state = state.mark(run)
      return ending.close_loader(run)
    end
    run.rows, run.counter = math.min(phase.batch, #o.train - run.done), core.steps()
    run.shards = core.shards(run.rows, run.grain)
    return x, y
  end
end

-- A loop over batches has ended, perhaps early.
function Mode:leave_loop() end

-- Whether this rank leaves it to another one to stop and to save.
function Mode:follows() return false end

-- Tells other ranks that the run stops. code: 75 after a signal, 0 at max_steps.
function Mode:stop() end

-- Raises an error if another rank used different settings in the last step.
function Mode:compare_step() core.compare_step() end

-- The number of ranks that share a batch, and what else divides it, or nil.
function Mode:division() return self.run.ranks, core.shards() > 1 and self.parts or nil end

-- EINVAL: the step uses an optimizer that is not one of the run.
function Mode:refuse_optimizer(optim)
  core.fail("EINVAL", ("run:step: this %s is not an optimizer of the run, which would not save it; "
                       .. "make it before lt.run, and give lt.run a list of all optimizers: optim "
                       .. "= {a, b}"):format(optim:class()))
end

-- ==== A step =====================================================================================

-- Called at the beginning of a step.
function Mode:begin_step() end

-- Calls fn(...) as lt.step does, in the run's precision and with its loss scale.
function Mode:call(fn, ...)
  local o = self.run.settings
  if not o.scaler then return core.step(core.autocast, o.amp, fn, ...) end
  return o.scaler:inside(core.step, core.autocast, o.amp, fn, ...)
end

-- The loss that the function of a step has returned: a number, or a deferred scalar.
function Mode:take_loss(given) return deferred.take(given, "run:step: the function") end

-- Adds the loss of a shard or micro-batch with `count` rows. loss: of take_loss(); rows: of this
-- rank. Returns the loss, and what run:step returns for the shard.
function Mode:add_loss(loss, given, count)
  local run = self.run
  if not run.alone then
    loss = deferred.number(loss)
    run.losses[run.shard] = count > 0 and loss * (count / run.rows) or 0.0
  end
  return loss, type(loss) == "number" and loss or given
end

-- The loss of the batch over all ranks. Sets `stop` if a rank requested it in this step's exchange.
function Mode:loss_of_batch(loss)
  local run = self.run
  if run.alone then return loss end
  local _, _, _, signal = core.reduced()
  run.stop = core.stop_reason(signal) or false
  return ranks.sum_shards("the loss", run.losses)
end

-- Called after a step with its seconds.
function Mode:note_seconds() end

-- The time of a simulation in seconds at the end of the step run.steps; else nil.
function Mode:virtual_time() end

local function continue_trial(run, seconds)
  local result, text = run.settings.trial:end_step(seconds)
  if not result then return end
  run.settings.amp, run.settings.trial = result.amp, false
  run.log:event("amp", result)
  run.log:note(text)
end

-- Ends a step after its last shard: updates the position and logs. Returns the loss of the batch. A
-- deferred loss is read at the end of the next step, or earlier by a call that needs it.
function Mode:end_step(loss)
  local run = self.run
  local rows, o = run.rows, run.settings
  loss = self:loss_of_batch(loss)
  local is_here = type(loss) == "number"
  if is_here then deferred.check_finite(loss, run.steps + 1) end
  run.rows, run.done, run.steps, run.saved = false, run.done + rows, run.steps + 1, false
  run.is_partial = false
  core.trace("step " .. run.steps, run.mark)
  local total = core.clock() - run.mark
  run.mark = run.mark + total
  self:note_seconds(total)
  run.epoch_s, run.epoch_images = run.epoch_s + total, run.epoch_images + rows
  run.spent.total, run.spent.sent = total, ranks.sent() - run.spent.sent
  run.open_step = {loss = loss, rows = rows, rate = run.rate, waited = run.waited,
                   spent = run.spent, scaled = o.scaler and o.scaler:latest(),
                   time = self:virtual_time()}
  if is_here then ending.close_step(run) end
  local text = run.data_wait:step(run.waited, total, rows, run.loader)
  if text then run.log:warn(text) end
  if o.trial then continue_trial(run, run.spent.inside) end
  if run.share then run.share:end_step(run, rows) end
  if run.observer then run.observer:end_step(rows, total, run.waited, run.spent) end
  run.is_settled = false
  agree.step(o, run.steps)
  return loss
end

-- The fractions of a step: forward, backward, optimizer, and `other` for the rest of 1. f has the
-- fractions data and exposed_comm; exposed: seconds of exposed_comm.
function Mode:add_fractions(f, total, spent, exposed)
  f.forward = (spent.inside - spent.backward - spent.optimizer) / total
  f.backward, f.optimizer = spent.backward / total, (spent.optimizer - exposed) / total
  f.other = 1 - f.data - f.forward - f.backward - f.exposed_comm - f.optimizer
end

-- The bytes that this rank has sent in a step; nil if that is not logged.
function Mode:sent(spent) return self.run.ranks > 1 and spent.sent or nil end

-- ==== Position ===================================================================================

-- The samples of the run before the current batch.
function Mode:position() return self:samples_seen() end

-- The samples that the run has trained on, over all epochs.
function Mode:samples_seen()
  return (self.run.epoch - 1) * #self.run.settings.train + self.run.done
end

-- The number of the run's last step, if its settings stay the same.
function Mode:last_step()
  local run, o = self.run, self.run.settings
  return run.steps + phases.steps(o.phases, run.epoch, run.done, o.epochs, #o.train)
end

-- The numbers of steps and samples at the end of the run's epoch, to be reported.
function Mode:end_of_epoch() return self.run.steps, self:samples_seen() end

-- ==== Evaluation and report ======================================================================

-- Called before an evaluation with the options of run:evaluate. Returns its result, if this rank
-- does not evaluate; else nil.
function Mode:begin_evaluation() end

-- What this rank contributes to the sum of a value over all ranks. value is a number or a tensor of
-- one element; read(value) checks it and returns a number.
function Mode:own(value, read) return read(value) end

-- Raises an error unless the run's epoch may be reported.
function Mode:check_report()
  if self.run.done > 0 then return end
  core.fail("EINVAL", "run:report: the epoch had no steps: for x, y in run:batches() do "
                      .. "run:step(...) end")
end

-- The run's epoch was reported.
function Mode:forget_epoch() end

-- The weights and buffers as text, for a comparison of all ranks; nil without a comparison.
function Mode:weights_text()
  local lines, names, tensors = {}, self.run.settings.net:state()
  for i, name in ipairs(names) do lines[i] = name .. " " .. core.digest(tensors[i]) end
  return table.concat(lines, "\n")
end

-- ==== Checkpoints ================================================================================

-- Whether a checkpoint is due after a step.
function Mode:is_save_due() return ending.is_save_due(self.run) end

-- Calls fn(...) while nothing changes the net, to save it. Returns its results.
function Mode:suspended(fn, ...) return fn(...) end

-- Raises ENUMERIC if the values that a checkpoint is about to get are not finite, unless
-- state.check_weights() has checked the same values.
function Mode:check_saved() end

-- On the other ranks: takes part in saving a checkpoint, and the final weights.
function Mode:send_checkpoint() end
function Mode:send_weights() end

-- Adds tensors to the lists of a checkpoint.
function Mode:add_state() end

-- Lists of what the next step applies: the names of parameters, the sums of their gradients, and
-- for each a count, 1 if there is a sum, else 0. Empty without a delay.
function Mode:delayed() return {}, {}, {} end

-- Called when a checkpoint has been read into the sums and counts of delayed().
function Mode:set_delayed() end

-- Numbers for a checkpoint, by name.
function Mode:numbers() return {} end

return Mode
