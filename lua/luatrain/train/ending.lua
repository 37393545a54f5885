-- ending.lua - what a run does at the end of a step and at its own end: records the step, saves
-- checkpoints, writes the final files and the end line.

local core = ...
local checkpoint = require "luatrain.train.checkpoint"
local command_line = require "luatrain.command_line"
local cost = require "luatrain.train.cost"
local deferred = require "luatrain.api.deferred"
local folder = require "luatrain.train.run_folder"
local log = require "luatrain.train.log"
local plot = require "luatrain.train.plot"
local progress = require "luatrain.train.progress"
local ranks = require "luatrain.train.ranks"
local state = require "luatrain.train.state"

local ending = {}

local SAVE_SECONDS = 600       -- maximum between two checkpoints
local SAVE_SHARE = 0.01        -- of a run's time, with launch --restarts; also at least
local LEAST_SAVE_SECONDS = 1   -- between two checkpoints

function ending.close_loader(self)
  self.mode:leave_loop()
  if self.loader then self.loader:close() end
  self.loader, self.rows = false, false
end

-- Reads the loss of the last step, if it was deferred, and records the step. A step whose loss is
-- not finite did not change the net: it is subtracted from the position, and an error is raised.
function ending.close_step(self)
  local step = self.open_step
  if not step then return end
  self.open_step = false
  step.loss = deferred.number(step.loss)
  if step.loss - step.loss ~= 0 then
    self.steps, self.done = self.steps - 1, self.done - step.rows
    deferred.check_finite(step.loss, self.steps + 1)
  end
  self.loss_sum = self.loss_sum + step.loss * step.rows
  progress.record(self, step)
end

-- Writes the end line and releases everything. exit: the process's exit code, unless the script
-- changes it; nil if the run is garbage-collected, possibly in the middle of another run. failed:
-- an error ends the run.
function ending.finish(self, exit, failed)
  pcall(ending.close_step, self)
  pcall(core.sync)             -- asynchronous errors no longer matter
  local scale, missed = self.settings.scaler, exit and ranks.missed_fault()
  self.status = "over"
  ending.close_loader(self)
  if self.root then pcall(self.mode.report, self.mode, exit) end
  local closed, why = pcall(self.mode.close, self.mode, failed)
  if not closed then exit = core.exit_code(why) end
  if missed then self.log:warn(missed) end
  local known, sha256 = false, nil
  if exit and self.mode:has_weights(failed) then
    known, sha256 = pcall(self.settings.net.sha256, self.settings.net)
  end
  local fields = {
    step = self.steps, top1 = self.result and self.result.top1 or nil,
    wall_s = core.clock() - self.began, peak_rss_bytes = core.peak_rss(),
    skipped = scale and scale.skipped or nil, resends = core.wire_scales().resends,
    weights_sha256 = known and sha256 or nil, failed_saves = self.failed_saves, exit = exit}
  if self.root then
    cost.add(fields, self.folder .. "/metrics.jsonl", self.settings.target, fields.wall_s)
  end
  self.log:event("end", fields)
  if self.failed_saves > 0 then
    self.log:warn(("%d checkpoint%s could not be saved"):format(
      self.failed_saves, self.failed_saves == 1 and "" or "s"))
  end
  self.log:close()
  if self.lock then self.lock:close() end
  -- Only now can a signal kill the process. If another rank's signal stopped the run, this rank may
  -- still get its own.
  if self.stop and not self.alone then self.listener:keep() else self.listener:close() end
  if not closed then error(why, 0) end
end

-- Excludes the time since `since` from the next step.
function ending.exclude_time_since(self, since) self.mark = self.mark + (core.clock() - since) end

-- Writes a checkpoint. Returns true, or false and the reason.
function ending.save(self)
  local o, before = self.settings, core.clock()
  if not self.root then
    self.mode:send_checkpoint()
    self.saved_step, self.saved = self.steps, true
    return true
  end
  local function write()
    self.mode:check_saved()
    local path = checkpoint.path(self.folder, self.steps)
    return path, folder.write(self, path, checkpoint.save, path, o.net, o.optims, state.of(self),
                              self.mode)
  end
  local path, ok, err = self.mode:suspended(write)
  if ok then checkpoint.prune(self.checkpoints, path) end
  self.saved_at, self.saved_step = core.clock(), self.steps
  ending.exclude_time_since(self, before)
  if not ok then
    self.failed_saves = self.failed_saves + 1
    return false, checkpoint.reason(err)
  end
  self.saved = true
  self.log:event("save", {step = self.steps, path = path, wall_s = self.saved_at - before})
  return true
end

-- A failed save, such as on a full disk, is only a warning.
function ending.save_or_warn(self)
  local ok, err = ending.save(self)
  if not ok then
    self.log:warn(("step %d was not saved: %s; training continues"):format(self.steps, err))
  end
end

-- The maximum of seconds between two checkpoints. With launch --restarts, what the ranks have
-- computed since the last one is lost with a rank, so a run saves as often as is cheap.
local function save_seconds(self)
  if self.settings.save_every or not command_line.variable "LUATRAIN_RESTARTED" then
    return SAVE_SECONDS
  end
  return math.min(math.max(self.save_cost / SAVE_SHARE, LEAST_SAVE_SECONDS), SAVE_SECONDS)
end

-- Whether a checkpoint is due after this step, which is the step after self.steps if next is true.
function ending.is_save_due(self, next)
  local every, steps = self.settings.save_every, self.steps + (next and 1 or 0)
  return every and steps // every > self.saved_step // every
         or core.clock() - self.saved_at >= save_seconds(self)
end

-- Saves a checkpoint if one is due after this step.
function ending.save_if_due(self)
  if not self.mode:is_save_due() then return end
  local before = core.clock()
  ending.close_step(self)
  state.check_weights(self)
  ending.save_or_warn(self)
  self.saved_at = core.clock()
  self.save_cost = self.saved_at - before
end

-- Whether a run can resume from this one's checkpoints: not if it replays a trace.
function ending.can_resume(self) return not self.mode.is_replay end

-- The end of a message: how to resume the run, or nothing. change: what to do before, or "". flag:
-- as for command_line.line().
function ending.resume_hint(self, change, flag)
  if not ending.can_resume(self) then return "" end
  return ("; %sresume with:\n  %s"):format(
    change, command_line.line(self.out, self.settings.resume, flag))
end

-- Ends the run with an error because a required file could not be saved.
function ending.give_up(self, what, err)
  ending.finish(self, 5, true)
  local text = ("%s: %s"):format(what, checkpoint.reason(err))
  if not ending.can_resume(self) then core.fail("EFILE", text) end
  local step = checkpoint.newest_step(self.folder)
  if step == 0 then
    core.fail("EFILE", text .. ". There is no checkpoint to resume from; name another --out")
  end
  core.fail("EFILE", ("%s. Resume from the checkpoint of step %d with the same command and --out "
                      .. "%s"):format(text, step, self.out or self.folder))
end

local function draw_curves(self)
  local path = self.folder .. "/curves.svg"
  local ok, err = folder.write(self, path, function()
    local events = log.read(self.folder .. "/metrics.jsonl")
    core.write_file(path, plot.curves(events, self.folder:match "[^/]*$"))
  end)
  if not ok then self.log:warn("no curves: " .. checkpoint.reason(err)) end
end

-- Ends the run after its last epoch: saves weights and curves.
function ending.complete(self)
  if not self.root then
    self.mode:send_weights()
    return ending.finish(self, 0)
  end
  self.mode:suspended(function() end)
  local names, tensors = self.settings.net:state()
  local path = self.folder .. "/weights.safetensors"
  local ok, err = folder.write(self, path, core.save, names, tensors, path, {})
  if not ok then ending.give_up(self, "the weights were not saved", err) end
  draw_curves(self)
  self.log:note(("done after %s%s: %s has weights.safetensors, curves.svg and metrics.jsonl")
                :format(log.duration(core.clock() - self.began),
                        progress.skipped(self, ", ") or "", self.folder))
  ending.finish(self, 0)
end

-- Ends the run if the script left its loop early. Saves a checkpoint, except in a step that
-- os.exit() interrupted: the net may be ahead of the position. exit: the process's exit code.
function ending.leave(self, exit)
  ending.close_step(self)
  folder.check(self)
  local ahead = self.rows and core.steps() ~= self.counter
  if not ahead and not self.saved and self.steps > 0 then
    state.check_weights(self)
    ending.save_or_warn(self)
  end
  if self.steps > 0 then
    self.log:note(("left at step %d, with %d of %d epochs done%s"):format(
      self.steps, self.epoch - 1, self.settings.epochs, ending.resume_hint(self, "")))
  end
  ending.finish(self, exit)
end

return ending
