-- progress.lua - the progress of a run, and its log entry after each step.

local core = ...
local check = require "luatrain.check"
local sorted = require "luatrain.keys"

local progress = {}

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- "8 of 16 steps were skipped", after the prefix `before`; nil if none was skipped.
function progress.skipped(run, before)
  local scale = run.settings.scaler
  local n = scale and scale.skipped or 0
  if n == 0 then return nil end
  return ("%s%d of %d step%s %s skipped"):format(
    before or "", n, run.steps, run.steps == 1 and "" or "s", n == 1 and "was" or "were")
end

-- The time of a step by activity, as fractions that add up to 1; `other` is the rest. On an
-- accelerator the host cannot time forward, backward and optimizer, so they are part of `other`.
local function fractions(mode, total, waited, spent)
  if not total then return {} end      -- another rank has computed the step
  local exposed = core.reduced()
  local f = {data = waited / total, exposed_comm = exposed / total}
  if core.device() == "cpu" then
    mode:add_fractions(f, total, spent, exposed)
  else
    f.other = 1 - f.data - f.exposed_comm
  end
  return f
end

-- Logs the last step. step has its values, since run may have moved on: loss, a number; rows;
-- rate, the learning rate; waited, seconds spent on data; spent, seconds and bytes; scaled, its
-- number in the scaler.
function progress.record(run, step)
  local o, spent = run.settings, step.spent
  local f = fractions(run.mode, spent.total, step.waited, spent)
  f.step, f.steps = run.steps, run.mode:last_step()
  f.epoch, f.epochs = step.epoch or run.epoch, o.epochs
  f.samples, f.batch, f.images = run.mode:samples_seen(), step.rows, #o.train
  f.loss, f.lr, f.samples_per_s = step.loss, step.rate, step.rows / (step.seconds or spent.total)
  f.worker, f.ticket, f.delay, f.time_s = step.worker, step.ticket, step.delay, step.time
  f.wire_bytes = run.mode:sent(spent)
  if o.scaler then f.scale, f.headroom, f.skipped = o.scaler:at(step.scaled) end
  run.log:step(f)
end

-- The fields that luatrain itself sets in the event of an epoch and in the run's report.
local OWN = {event = true, t = true, epoch = true, epochs = true, step = true, samples = true,
             size = true, samples_per_s = true, wall_s = true, train_loss = true}

-- EINVAL unless the argument of run:report is nil or a table of numbers by name.
function progress.check_report(numbers)
  if numbers ~= nil and type(numbers) ~= "table" then
    fail("run:report requires numbers by name, as run:evaluate returns them, but got %s",
         check.described(numbers))
  end
  for name, value in pairs(numbers or {}) do
    if type(name) ~= "string" or type(value) ~= "number" then
      fail("run:report requires numbers by name, but %s is a %s", tostring(name), type(value))
    elseif not utf8.len(name) or name == "" or name:find "%c" then
      fail("run:report requires names in printable UTF-8, but got %q", name)
    elseif OWN[name] or name == "test_loss" and numbers.loss then
      fail("run:report: luatrain reports '%s' itself; choose another name", name)
    end
  end
end

-- Warns if the result of an evaluation is not finite, and once if its loss is not the training's.
function progress.warn_of_result(run, result)
  if not run.root then return end
  for _, name in ipairs(sorted(result)) do
    if result[name] - result[name] ~= 0 then
      run.log:warn(("run:evaluate: the %s is %s in epoch %d; check the data of the set"):format(
        name, result[name] ~= result[name] and "nan" or "inf", run.epoch))
    end
  end
  if result.loss or run.told_of_loss then return end
  run.told_of_loss = true
  run.log:warn("run:evaluate: the training step does not call lt.cross_entropy, so the result has "
               .. "cross_entropy instead of loss; give lt.run the training's loss: loss = "
               .. "function(logits, y) ... end")
end

return progress
