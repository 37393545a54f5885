-- pipeline.lua - training in a pipeline: --parallel pipe=P. Each rank has a stage of the net; see
-- dist/pipeline.h. tools/plan.c has found the plan before the script starts.

local core = ...
local json = require "luatrain.json"

local pipeline = {}

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

local warning                  -- for the first run of the script, on rank 0; or nil

-- ==== Runs =======================================================================================

-- A plan as a line of text.
function pipeline.describe(plan)
  local text = "no pipeline: data parallelism is fastest"
  if plan.stages > 1 or plan.micro > 1 then
    local form = "pipeline: stages = %d%s, replicas = %d, micro-batches = %d, schedule %s, lag %d"
    text = form:format(
      plan.stages, #plan.cuts > 0 and " cut at " .. table.concat(plan.cuts, ", ") or "",
      plan.replicas, plan.micro, plan.schedule, plan.lag)
  end
  if plan.seconds then text = ("%s; predicted %.3g s a step"):format(text, plan.seconds) end
  return text
end

-- Writes the plan to a run's folder: plan.json. measured: seconds of a step, or nil.
local function write_plan(folder, measured)
  pipeline.plan.measured = measured
  core.write_file(folder .. "/plan.json", json.text(pipeline.plan, 1) .. "\n")
end

local seconds = {}             -- of the steps of the run, on rank 0

-- Called at the start of a run on rank 0.
function pipeline.start(run)
  if not pipeline.plan then return end
  seconds = {}
  run.log:note(pipeline.describe(pipeline.plan))
  if warning then run.log:warn(warning) end
  warning = nil
  write_plan(run.folder)
end

-- Called after each step, with its seconds.
function pipeline.end_step(total)
  if pipeline.plan then seconds[#seconds + 1] = total end
end

-- Called at the end of a run on rank 0: writes and prints the median of the measured steps, without
-- the first, in which memory is allocated.
function pipeline.finish(run)
  if not pipeline.plan or #seconds < 3 then return end
  table.remove(seconds, 1)
  table.sort(seconds)
  local median = seconds[(#seconds + 1) // 2]
  pcall(write_plan, run.folder, median)
  if not pipeline.plan.seconds then return end
  run.log:note(("pipeline: a step took %.3g s (median), predicted %.3g s"):format(
    median, pipeline.plan.seconds))
end

-- EUSAGE if a run with settings o cannot train in a pipeline.
function pipeline.check(o)
  if core.joins_pipeline() and not pipeline.plan then
    pipeline.plan, warning = core.pipeline_plan()
  end
  if not core.pipeline() then return end
  if o.amp == "auto" then
    refuse "--amp auto cannot be combined with --parallel pipe=P; choose off, bf16 or fp16"
  elseif o.amp_check then
    refuse "--amp-check cannot be combined with --parallel pipe=P"
  elseif o.check_sync then
    refuse "--check-sync cannot be combined with --parallel pipe=P"
  end
end

-- Appends to a list, for check_writes(), how often this rank has written to tensors of each stage.
-- Returns the previous length of the list.
function pipeline.add_writes(list)
  local length, _, stages = #list, core.pipeline()
  for stage = 1, stages do list[length + stage] = core.writes(stage - 1) end
  return length
end

-- EDESYNC if a write is lost: a rank has written to tensors of a stage, but the rank that has them
-- has not. list: `width` numbers of each rank. The last ones of a rank are from add_writes().
function pipeline.check_writes(list, width)
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

-- The seconds of a step on this rank: {forward =, backward =, weights =, waiting =, optimizer =}.
-- spent: see run.lua.
function pipeline.times(spent)
  local backward, weights, waiting, drained = core.pipeline_times()
  local optimizer = spent.optimizer - drained
  return {forward = spent.inside - optimizer - backward - weights - waiting, backward = backward,
          weights = weights, waiting = waiting, optimizer = optimizer}
end

-- What this rank contributes to the sum of a value over all ranks. value is a number or a tensor of
-- one element; read(value) checks it and returns a number. One stage of each replica contributes a
-- tensor, the first one a number, and the others 0.
function pipeline.own(value, read)
  local stage = core.pipeline()
  if not stage then return read(value) end
  if not core.is_tensor(value) then return stage == 0 and read(value) or 0.0 end
  if not core.counts(value) then return 0.0 end
  return read(value:count() == 1 and core.own_item(value) or value)
end

return pipeline
