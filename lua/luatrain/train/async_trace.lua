-- async_trace.lua - reads the trace of an asynchronous run, which is the metrics.jsonl in its
-- folder, to replay it.
--
-- A run that was resumed has several start events. The steps after a start event were made by as
-- many workers as it says, with its batch, seed and precision.

local core = ...
local json = require "luatrain.json"
local log = require "luatrain.train.log"
local MOST_WORKERS = require "luatrain.train.parallel".MOST_WORKERS

local trace = {}

local function refuse(...) core.fail("EUSAGE", "--simulate: " .. string.format(...)) end

-- Iterates over the events of a file, which are tables of numbers and strings: the JSON objects of
-- its lines. Skips torn lines; check_step() detects missing steps.
local function read_events(path)
  local ok, lines = pcall(log.lines, path)
  if not ok then refuse("%s", lines) end
  return function()
    for line in lines do
      local is_json, value = pcall(json.read, line)
      if is_json and type(value) == "table" then
        for key, item in pairs(value) do
          local is_name = key == "event" or key == "amp" or key == "rule"
          if type(item) ~= (is_name and "string" or "number") then value[key] = nil end
        end
        return value
      end
    end
  end
end

-- The number of workers of a start event, or nil if it has none.
local function workers_of(path, start)
  local workers = math.tointeger(start.workers)
  if start.workers and (not workers or workers < 1 or workers > MOST_WORKERS) then
    refuse("%s has an invalid number of workers, %s", path, start.workers)
  end
  return workers
end

-- Checks that a run with settings `run` can repeat the steps after a start event.
local function check_start(path, start, run)
  for _, item in ipairs{
    {"seed %s, but now it is %d", start.seed, core.seed()},
    {"batches of %s images, but now they have %d", start.batch, run.batch},
  } do
    local text, was, is = table.unpack(item)
    if was and was ~= is then refuse("%s was made with %s", path, text:format(was, is)) end
  end
  if start.amp == "fp16" then
    refuse("%s was made with amp fp16, which cannot be replayed: each worker has a loss scale of "
           .. "its own", path)
  end
end

-- Checks the line of step n. workers: their number, if it is known.
local function check_step(path, event, n, workers)
  if not (event.worker and event.ticket and event.delay) then
    refuse("%s is not the metrics.jsonl of an asynchronous run", path)
  elseif event.step ~= n then
    refuse("%s has step %s where step %d is expected", path, event.step, n)
  end
  for _, name in ipairs{"worker", "ticket", "delay"} do
    local value = math.tointeger(event[name])
    if not value or value < 0 or name == "worker" and value >= (workers or MOST_WORKERS) then
      refuse("step %d of %s has an invalid %s, %s", n, path, name, event[name])
    end
    event[name] = value
  end
end

-- Checks the number of workers of a resumed run: `now`, `before` it was resumed, and the `largest`
-- one so far. A checkpoint has the velocities of only those workers that the run had when it was
-- saved.
local function check_workers(path, rule, now, before, largest)
  if rule == "ormo" and now ~= largest then
    refuse("%s was resumed with another number of workers: %d, before %d; ormo cannot replay it",
           path, now, largest)
  elseif (rule == "ddc" or rule == "dana") and before < math.min(now, largest) then
    refuse("%s was resumed with fewer workers and then with more: %d, then %d, then %d; %s, which "
           .. "has a velocity per worker, cannot replay it", path, largest, before, now, rule)
  end
end

-- Reads the steps of a run. Returns a list with worker, ticket and read of each step in turn, the
-- number of workers, and by step, the losses of steps with the rule of the replay. o, run: the
-- options and the settings of the replay.
function trace.read(o, run)
  local path, rule = o.trace, o.rule
  local steps, losses, largest, n, start, checked = {}, {}, 0, 0, {}, nil
  local given                                  -- number of workers in the start events with steps
  local least = math.huge                      -- smallest such number since the last step
  for event in read_events(path) do
    if event.event == "start" then
      start, event.workers = event, workers_of(path, event)
      least = math.min(least, event.workers or math.huge)
    elseif event.event == "step" then
      n = n + 1
      check_step(path, event, n, start.workers)
      if start ~= checked then
        check_start(path, start, run)
        if given and start.workers then
          check_workers(path, rule, start.workers, least, given)
        end
        given, checked = math.max(given or 0, start.workers or 0), start
        least = start.workers or math.huge
      end
      largest = math.max(largest, event.worker + 1)
      steps[#steps + 1] = event.worker
      steps[#steps + 1] = event.ticket
      steps[#steps + 1] = n - 1 - event.delay
      losses[n] = start.rule == o.text and event.loss or nil
    end
  end
  if n == 0 then refuse("%s has no steps of an asynchronous run", path) end
  return steps, math.max(largest, given), losses
end

return trace
