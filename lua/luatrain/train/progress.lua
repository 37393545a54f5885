-- progress.lua - the progress of a run, and its log entry after each step.

local core = ...
local check = require "luatrain.check"
local phases = require "luatrain.train.phases"
local sorted = require "luatrain.keys"

local progress = {}

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- The number of the run's last step, if its settings stay the same.
function progress.last_step(run)
  local o = run.settings
  if run.async then return run.async:last_step() end
  return run.steps + phases.steps(o.phases, run.epoch, run.done, o.epochs, #o.train)
end

-- The number of samples that the run has trained on, over all epochs.
function progress.samples(run)
  if run.async then return run.async.samples end
  return (run.epoch - 1) * #run.settings.train + run.done
end

-- The numbers of steps and samples at the end of the run's epoch, to be reported.
function progress.end_of_epoch(run)
  if run.async then return run.async:end_of_epoch() end
  return run.steps, progress.samples(run)
end

-- "8 of 16 steps were skipped", after the prefix `before`; nil if none was skipped.
function progress.skipped(run, before)
  local scale = run.settings.scaler
  local n = scale and scale.skipped or 0
  if n == 0 then return nil end
  return ("%s%d of %d step%s %s skipped"):format(
    before or "", n, run.steps, run.steps == 1 and "" or "s", n == 1 and "was" or "were")
end

-- Adds the fractions of a step in a pipeline to f: the fractions of this rank, and in f.stages a
-- list {forward, backward, weights, waiting} for each stage.
local function add_stages(f, total, spent, exposed)
  local own = spent.own
  f.optimizer = (own.optimizer - exposed) / total
  f.other = 1 - f.data - f.exposed_comm - f.optimizer
  for _, name in ipairs{"forward", "backward", "weights", "waiting"} do
    f[name] = own[name] / total
    f.other = f.other - f[name]
  end
  f.stages = {}
  for i, times in ipairs(spent.stages) do
    f.stages[i] = {}
    for k, seconds in ipairs(times) do
      f.stages[i][k] = math.floor(seconds / total * 1e4 + 0.5) / 1e4
    end
  end
  return f
end

-- The time of a step by activity, as fractions that add up to 1; `other` is the rest. On an
-- accelerator the host cannot time forward, backward and optimizer, so they are part of `other`.
local function fractions(total, waited, spent)
  if not total then return {} end      -- another rank has computed the step
  local exposed = core.reduced()
  local f = {data = waited / total, exposed_comm = exposed / total}
  if core.device() ~= "cpu" then
    f.other = 1 - f.data - f.exposed_comm
    return f
  end
  if spent.own then return add_stages(f, total, spent, exposed) end
  f.forward = (spent.inside - spent.backward - spent.optimizer) / total
  f.backward, f.optimizer = spent.backward / total, (spent.optimizer - exposed) / total
  f.other = 1 - f.data - f.forward - f.backward - f.exposed_comm - f.optimizer
  return f
end

-- Logs the last step. step has its values, since run may have moved on: loss, a number; rows;
-- rate, the learning rate; waited, seconds spent on data; spent, seconds and bytes; scaled, its
-- number in the scaler.
function progress.record(run, step)
  local o, spent = run.settings, step.spent
  local f = fractions(spent.total, step.waited, spent)
  f.step, f.steps = run.steps, progress.last_step(run)
  f.epoch, f.epochs = step.epoch or run.epoch, o.epochs
  f.samples, f.batch, f.images = progress.samples(run), step.rows, #o.train
  f.loss, f.lr, f.samples_per_s = step.loss, step.rate, step.rows / (step.seconds or spent.total)
  f.worker, f.ticket, f.delay, f.time_s = step.worker, step.ticket, step.delay, step.time
  if run.ranks > 1 and not run.async then f.wire_bytes = spent.sent end
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
