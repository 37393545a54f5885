-- pipeline_mode.lua - runs in a pipeline, --parallel pipe=P, and runs for which the planner has
-- chosen data parallelism instead. In a pipeline, each rank has a stage of the net; see
-- dist/pipeline.h. tools/plan.c has found the plan before the script starts. mode.lua describes the
-- methods.

local core = ...
local check = require "luatrain.check"
local checkpoint = require "luatrain.train.checkpoint"
local ending = require "luatrain.train.ending"
local json = require "luatrain.json"
local Mode = require "luatrain.train.mode"
local ranks = require "luatrain.train.ranks"
local scaler = require "luatrain.api.scaler"

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

-- ==== Runs with a plan ===========================================================================

local Planned = setmetatable({}, Mode)
Planned.__index = Planned

local plan, warning            -- plan of the job; a warning for the first run on rank 0, or nil

-- The plan as a line of text.
local function plan_text()
  local text = "no pipeline: data parallelism is fastest"
  if plan.stages > 1 or plan.micro > 1 then
    local form = "pipeline: stages = %d%s, replicas = %d%s, micro-batches = %d, schedule %s, lag %d"
    text = form:format(
      plan.stages, #plan.cuts > 0 and " cut at " .. table.concat(plan.cuts, ", ") or "",
      plan.replicas, plan.replicas == 1 and "" or plan.delay == 1
      and " (sums overlap with the next step, which applies them)"
      or " (sums overlap with the last pass)",
      plan.micro, plan.schedule, plan.lag)
  end
  if plan.seconds then text = ("%s; predicted %.3g s a step"):format(text, plan.seconds) end
  return text
end

-- Writes the plan to a run's folder: plan.json. measured: seconds of a step, or nil.
local function write_plan(folder, measured)
  plan.measured = measured
  core.write_file(folder .. "/plan.json", json.text(plan, 1) .. "\n")
end

function Planned:print_start()
  local run = self.run
  run.log:note(plan_text())
  if warning then run.log:warn(warning) end
  warning = nil
  write_plan(run.folder)
end

function Planned:note_seconds(total)
  if self.run.root then self.seconds[#self.seconds + 1] = total end
end

-- Writes and prints the median of the measured steps, without the first, in which memory is
-- allocated.
function Planned:report()
  local run, seconds = self.run, self.seconds
  if #seconds < 3 then return end
  table.remove(seconds, 1)
  table.sort(seconds)
  local median = seconds[(#seconds + 1) // 2]
  pcall(write_plan, run.folder, median)
  if not plan.seconds then return end
  run.log:note(("pipeline: a step took %.3g s (median), predicted %.3g s"):format(median,
                                                                                 plan.seconds))
end

-- ==== Runs in a pipeline =========================================================================

local Pipeline = setmetatable({parts = "micro-batches"}, Planned)
Pipeline.__index = Pipeline

-- EUSAGE if a run with settings o cannot train in a pipeline.
local function check_settings(o)
  if o.amp == "auto" then
    refuse "--amp auto cannot be combined with --parallel pipe=P; choose off, bf16 or fp16"
  elseif o.amp_check then
    refuse "--amp-check cannot be combined with --parallel pipe=P"
  elseif o.check_sync then
    refuse "--check-sync cannot be combined with --parallel pipe=P"
  end
end

function Pipeline.of(o)
  if core.joins_pipeline() and not plan then plan, warning = core.pipeline_plan() end
  if not core.pipeline() then return plan and setmetatable({seconds = {}}, Planned) end
  check_settings(o)
  return setmetatable({
    delay = core.has_delay() and 1 or 0,
    seconds = {},                -- of the steps of the run
    scale_before = false,        -- the loss scale before the step, or false
    save_due = false,            -- whether rank 0 wants to save after a step
  }, Pipeline)
end

function Pipeline:has_weights(failed) return not failed end

function Pipeline:division()
  local _, _, _, replicas = core.pipeline()
  return replicas, self.parts
end

-- ---- A step ----

function Pipeline:begin_step() core.pipeline_times() end     -- starts a new count

-- Backward passes of a micro-batch also run in the next run:step. So the loss scale stays in use
-- from the first micro-batch to the last.
function Pipeline:call(fn, ...)
  local run, o = self.run, self.run.settings
  if not o.scaler then return Mode.call(self, fn, ...) end
  if run.shard == 1 then self.scale_before = scaler.use(o.scaler) or false end
  local given = core.step(core.autocast, o.amp, fn, ...)
  if run.shard == run.shards then core.use_loss_scale(self.scale_before or nil) end
  return given
end

function Pipeline:take_loss() return 0.0 end

local function product(a, b) return a * b end

-- This rank's part of the loss of a micro-batch, times its share.
local function share_of(self, given, share)
  if core.is_tensor(given) then given = core.step(core.no_grad, product, given, share) end
  local loss = self:own(given, function(value)
    return check.number(value, "run:step: the function", "the loss")
  end)
  return core.is_tensor(given) and loss or loss * share
end

function Pipeline:add_loss(loss, given, count, rows)
  local run = self.run
  run.losses[run.shard] = count > 0 and share_of(self, given, count / rows) or 0.0
  return loss, given
end

-- The seconds of a step on this rank: {forward =, backward =, weights =, waiting =, optimizer =}.
local function times_of(spent)
  local backward, weights, waiting, drained = core.pipeline_times()
  local optimizer = spent.optimizer - drained
  return {forward = spent.inside - optimizer - backward - weights - waiting, backward = backward,
          weights = weights, waiting = waiting, optimizer = optimizer}
end

-- Appends to a list, for check_writes(), how often this rank has written to tensors of each stage.
-- Returns the previous length of the list.
local function add_writes(list)
  local length, _, stages = #list, core.pipeline()
  for stage = 1, stages do list[length + stage] = core.writes(stage - 1) end
  return length
end

-- EDESYNC if a write is lost: a rank has written to tensors of a stage, but the rank that has them
-- has not. list: `width` numbers of each rank. The last numbers of a rank are from add_writes().
local function check_writes(list, width)
  local _, stages, _, replicas = core.pipeline()
  for rank = 0, stages * replicas - 1 do
    for stage = 0, stages - 1 do
      local at, owner = width - stages + stage + 1, stage * replicas + rank % replicas
      if list[rank * width + at] > list[owner * width + at] then
        local n, place = core.writes(stage)
        core.compare(("writes to tensors of stage %d, which all ranks must make"):format(stage),
                     n == 0 and "none" or ("%d, the last at %s"):format(n, place:sub(1, -3)))
      end
    end
  end
end

-- Also exchanges all else that the ranks must learn in each step: requests to stop and to save, and
-- times. Raises an error if optimizers of stages have other settings.
function Pipeline:loss_of_batch()
  local run = self.run
  local _, _, rows = core.shard(run.rows, 1, run.grain)
  local _, signal = core.stop_reason()
  local loss = 0.0
  for part = 1, run.shards do loss = loss + run.losses[part] end
  local times = times_of(run.spent)
  local own = {loss * (rows / run.rows), signal or 0, signal and 1 or 0,
               run.root and ending.is_save_due(run, true) and 1 or 0,
               times.forward, times.backward, times.weights, times.waiting,
               core.settings_digest()}
  local digest = add_writes(own)
  local all, list, same = {0.0, 0.0, 0.0, 0.0}, ranks.gather("the step", own), true
  for i = 1, #list, #own do
    for k = 1, #all do all[k] = all[k] + list[i + k - 1] end
    same = same and list[i + digest - 1] == list[digest]
  end
  if not same then core.compare_step() end
  check_writes(list, #own)
  run.spent.own, run.spent.stages = times, {}
  local _, stages, _, replicas = core.pipeline()
  for stage = 1, stages do            -- takes the times of its first replica
    local first = (stage - 1) * replicas * #own + #all + 1
    run.spent.stages[stage] = table.move(list, first, first + 3, 1, {})
  end
  run.stop = all[3] > 0 and core.stop_reason(math.tointeger(all[2] // all[3])) or false
  self.save_due = all[4] > 0
  return all[1]
end

-- Adds the fractions of this rank, and in f.stages a list {forward, backward, weights, waiting} for
-- each stage.
function Pipeline:add_fractions(f, total, spent, exposed)
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
end

-- ---- Values of the net ----

-- One stage of each replica contributes a tensor, the first one a number, and the others 0.
function Pipeline:own(value, read)
  if not core.is_tensor(value) then return core.pipeline() == 0 and read(value) or 0.0 end
  if not core.owns(value) then return 0.0 end
  return read(value:count() == 1 and core.own_item(value) or value)
end

-- Also if a write was lost: see check_writes().
function Pipeline:compare_step()
  core.compare_step()
  local own = {}
  add_writes(own)
  check_writes(ranks.gather("the writes to the net", own), #own)
end

function Pipeline:weights_text() return self.run.settings.net:sha256() end

-- ---- Checkpoints ----

-- All replicas of a stage have the same sums.
function Pipeline:delayed()
  local names, sums, counts = {}, {}, {}
  if self.delay == 0 then return names, sums, counts end
  for _, item in ipairs(core.inner_of(self.run.settings.optim).parameters) do
    local i = #names + 1
    names[i], sums[i], counts[i] = item.name, core.delayed(item.tensor)
  end
  return names, sums, counts
end

function Pipeline:set_delayed(counts)
  for i, item in ipairs(core.inner_of(self.run.settings.optim).parameters) do
    if not core.is_meta(item.tensor) then
      core.set_delayed(item.tensor, core.own_item(counts[i]) ~= 0)
    end
  end
end

-- Rank 0 decides for all.
function Pipeline:is_save_due() return self.save_due end

function Pipeline:send_checkpoint()
  local o = self.run.settings
  checkpoint.send(o.net, o.optims, self)
end

function Pipeline:send_weights() core.save(self.run.settings.net:state()) end

return Pipeline
