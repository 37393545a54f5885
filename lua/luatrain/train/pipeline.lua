-- pipeline.lua - training in a pipeline: --parallel pipe=P. Each rank has a stage of the net; see
-- dist/pipeline.h. tools/plan.c has found the plan before the script starts.

local core = ...
local json = require "luatrain.json"

local pipeline = {}

local warning                  -- on rank 0: a warning for the first run, or nil

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

local seconds = {}             -- on rank 0: seconds of the steps of the run

-- Called at the start of a run on rank 0.
function pipeline.start(run)
  seconds = {}
  run.log:note(pipeline.describe(pipeline.plan))
  if warning then run.log:warn(warning) end
  warning = nil
  write_plan(run.folder)
end

-- Called after each step on rank 0, with its seconds.
function pipeline.end_step(total) seconds[#seconds + 1] = total end

-- Called at the end of a run on rank 0: writes and prints the median of the measured steps, without
-- the first, in which memory is allocated.
function pipeline.finish(run)
  if #seconds < 3 then return end
  table.remove(seconds, 1)
  table.sort(seconds)
  local median = seconds[(#seconds + 1) // 2]
  pcall(write_plan, run.folder, median)
  if not pipeline.plan.seconds then return end
  run.log:note(("pipeline: a step took %.3g s (median), predicted %.3g s"):format(
    median, pipeline.plan.seconds))
end

-- Called before each run. The first one takes the plan of the job.
function pipeline.take_plan()
  if core.joins_pipeline() and not pipeline.plan then
    pipeline.plan, warning = core.pipeline_plan()
  end
end

return pipeline
