-- async_trace.lua - reads the trace of an asynchronous run, which is the metrics.jsonl in its
-- folder, to replay it.
--
-- A run that was resumed has several start events. The steps after a start event were made by as
-- many workers as it says, with its batch, seed and precision.

local core = ...
local log = require "luatrain.train.log"
local MOST_WORKERS = require "luatrain.train.async_options".MOST_WORKERS

local trace = {}

local function refuse(...) core.fail("EUSAGE", "--simulate: " .. string.format(...)) end

-- Checks that a run with settings `run` can repeat the steps after a start event.
local function check_start(path, start, run)
  for _, item in ipairs{
    {"seed %d, but now it is %d", start.seed, core.seed()},
    {"batches of %d images, but now they have %d", start.batch, run.batch},
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

-- Reads the steps of a run. Returns a list with worker, ticket and read of each step in turn, and
-- the number of workers. rule, run: the rule and the settings of the replay.
function trace.read(path, rule, run)
  local ok, events = pcall(log.read, path)
  if not ok then refuse("%s", events) end
  local steps, largest, n, start, checked = {}, 0, 0, {}, nil
  local given                                  -- number of workers in the start events with steps
  for event in events do
    if event.event == "start" then
      start = event
    elseif event.event == "step" then
      n = n + 1
      check_step(path, event, n, start.workers)
      if start ~= checked then
        check_start(path, start, run)
        if rule == "ormo" and given and start.workers and start.workers ~= given then
          refuse("%s was resumed with another number of workers: %d, before %d; ormo cannot replay "
                 .. "it", path, start.workers, given)
        end
        given, checked = math.max(given or 0, start.workers or 0), start
      end
      largest = math.max(largest, event.worker + 1)
      steps[#steps + 1] = event.worker
      steps[#steps + 1] = event.ticket
      steps[#steps + 1] = n - 1 - event.delay
    end
  end
  if n == 0 then refuse("%s has no steps of an asynchronous run", path) end
  return steps, math.max(largest, given)
end

return trace
