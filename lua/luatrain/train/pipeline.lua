-- pipeline.lua - training in a pipeline: --parallel pipe=P. Each rank has a stage of the net; see
-- dist/pipeline.h.

local core = ...
local checkpoint = require "luatrain.train.checkpoint"
local command_line = require "luatrain.train.command_line"
local json = require "luatrain.json"
local options = require "luatrain.train.pipe_options"
local planner = require "luatrain.train.pipe_planner"
local plans = require "luatrain.commands.plan"

local pipeline = {}

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

-- The stage, from 0, of a unit. first: the first unit of each stage after stage 0.
local function stage_of(first, unit)
  local stage = 0
  while stage < #first and unit >= first[stage + 1] do stage = stage + 1 end
  return stage
end

-- The plan that the options describe without the planner: the user has named the cuts.
local function given_plan(o, profile)
  local plan = {stages = o.pipe, replicas = o.data, micro = o.micro, schedule = o.schedule or "zb",
                lag = o.lag or (o.schedule == "gpipe" and 0 or 1), cuts = o.cut,
                stage = {{first = 1}}}
  for i, unit in ipairs(options.cuts(profile, o.cut)) do plan.stage[i + 1] = {first = unit} end
  return plan
end

-- The plan of this job. Rank 0 chooses it.
local function plan_of(o, profile, ranks)
  local plan
  local is_given = o.pipe and #o.cut == o.pipe - 1 and not o.memory
  if is_given or o.pipe == 1 then o.micro = o.micro or 4 end
  if is_given then
    plan = given_plan(o, profile)
  else
    local found = planner.find(o, profile, ranks)
    plan = found and found[1]
  end
  return json.read(core.broadcast_text("the plan of the pipeline", json.text(plan or {})))
end

-- Divides the parameters of the profile among the stages, and opens the pipeline.
local function open(plan, profile)
  local first, names, stages = {}, {}, {}
  for i = 2, plan.stages do first[i - 1] = plan.stage[i].first end
  for i, param in ipairs(profile.params) do
    names[i] = param.name
    stages[i] = stage_of(first, param.unit > 0 and param.unit or 1)
  end
  core.open_pipeline(names, stages, plan.stages, plan.schedule, plan.lag, plan.micro)
end

-- ==== Resumed runs ===============================================================================

local LONGEST = 1 << 20        -- bytes of a plan.json

-- The number of micro-batches in a plan.json; nil if there is no such file. EFILE if it cannot be
-- read.
local function micro_in(path)
  local function reject(...)
    core.fail("EFILE", ("%s: %s; remove the file, and set micro=M in --parallel to the "
                        .. "number of micro-batches of that run"):format(path, string.format(...)))
  end
  local file, why = core.open_plain(path, "r")
  if not file and not why then return nil end
  if not file then reject("cannot be read: %s", why:sub(#path + 3)) end
  local text, failure = file:read(LONGEST + 1)
  file:close()
  if failure then reject("cannot be read: %s", failure) end
  if text and #text > LONGEST then reject("the file is longer than 1 MiB") end
  local ok, plan = pcall(json.read, text or "")
  if not ok then reject "it is not the JSON of a plan" end
  local micro = type(plan) == "table" and plan.micro
  if math.type(micro) ~= "integer" or micro < 1 or micro > options.MOST then
    reject("micro must be an integer from 1 to %d", options.MOST)
  end
  return micro
end

local warning                  -- for the first run of the script, on rank 0; or nil

-- On rank 0, the number of micro-batches of this run: `micro`, if the user has set it, else that of
-- the run that it resumes, because results depend on it, and the planner may choose another one
-- each time. nil if it is free. out, resume: the settings of the run.
local function choose_micro(micro, out, resume)
  local from = resume
  if resume == "auto" then from = out or checkpoint.newest_folder(command_line.script()) end
  local folder = from and resume ~= "never" and checkpoint.folder_of(from)
  if not folder then return micro end
  local path = folder .. "/plan.json"
  local earlier = micro_in(path)
  if not micro and not earlier then
    warning = ("%s is missing, so this run may have another number of micro-batches than the one "
               .. "that it resumes, and other results"):format(path)
  elseif micro and earlier and micro ~= earlier then
    warning = ("%s was made with micro=%d, but now it is %d"):format(path, earlier, micro)
  end
  return micro or earlier
end

-- The number of micro-batches on all ranks, nil if it is free. Rank 0 reads the files.
local function resumed_micro(micro, out, resume)
  if core.rank() == 0 then micro = choose_micro(micro, out, resume) end
  return math.tointeger(tonumber(core.broadcast_text("the number of micro-batches",
                                                     tostring(micro or ""))))
end

-- Starts the pipeline of this rank, before the script places parameters. If the planner finds that
-- one stage is fastest, starts data parallelism instead. If the script exits before its first
-- backward pass, for example after --help, starts neither.
function pipeline.begin()
  if command_line.plan then return plans.show(command_line.plan) end
  local _, ranks = core.job_rank()
  local o = options.read(ranks)
  local profile = planner.profile()
  if not profile then return end
  o.micro = resumed_micro(o.micro, profile.out, profile.resume)
  local plan = plan_of(o, profile, ranks)
  pipeline.plan = plan
  if plan.stages == 1 and plan.micro == 1 and not o.pipe then return core.open_reducer() end
  open(plan, profile)
end

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
    planner.leave(planner.exit, "before its first backward pass, so there is no plan")
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
