-- async_options.lua - reads the options of asynchronous training, and traces.
local core = ...
local log = require "luatrain.train.log"

local options = {}

local MOST_WORKERS = 4096

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

local function text_of(name)
  local text = os.getenv(name)
  return text ~= "" and text or nil
end

local function integer_of(key, text, least)
  local value = math.tointeger(tonumber(text))
  if not value or value < least then
    refuse("--parallel: %s must be an integer of at least %d, but is '%s'", key, least, text)
  end
  return value
end

-- "async=ddc,staleness=8,drop=16" as {rule = "ddc", staleness = 8, drop = 16}
local function read_parallel(text)
  local o, least = {}, {staleness = 0, drop = 1}
  for item in (text .. ","):gmatch "([^,]*)," do
    local key, value = item:match "^(%w+)=(.+)$"
    if not o.rule and key ~= "async" then
      refuse("--parallel must begin with async=RULE, but is '%s'", text)
    elseif key and o[key == "async" and "rule" or key] then
      refuse("--parallel: %s is given twice in '%s'", key, text)
    elseif key == "async" then
      o.rule = value
    elseif least[key] then
      o[key] = integer_of(key, value, least[key])
    elseif key == "lam" and tonumber(value) then
      o.lam = tonumber(value)
    else
      refuse("--parallel must be async=RULE[,staleness=S][,drop=R][,lam=X], but is '%s'", text)
    end
  end
  return o
end

-- "workers=4,delay=lognormal:0.2:1,1,2" as {workers = 4, sigma = 0.2, times = {1, 1, 2}};
-- "trace:FILE" as {trace = FILE}
local function read_simulate(text)
  local file = text:match "^trace:(.+)$"
  if file then return {trace = file} end
  local workers, sigma, rest = text:match "^workers=(%d+),delay=lognormal:([^:]+)(.*)$"
  local o = {workers = math.tointeger(tonumber(workers)), sigma = tonumber(sigma), times = {}}
  if not o.workers or not o.sigma then
    refuse("--simulate must be workers=N,delay=lognormal:SIGMA[:T1,T2,...] or trace:FILE, but is "
           .. "'%s'", text)
  elseif o.workers < 1 or o.workers > MOST_WORKERS then
    refuse("--simulate: the number of workers must be from 1 to %d, but is %s", MOST_WORKERS,
           workers)
  end
  for item in rest ~= "" and (rest:sub(2) .. ","):gmatch "([^,]*)," or function() end do
    local time = tonumber(item)
    if not time or not (time >= 1e-9 and time <= 1e9) then
      refuse("--simulate: '%s' is not a time from 1e-9 to 1e9 seconds", item)
    end
    o.times[#o.times + 1] = time
  end
  return o
end

-- Returns the options of asynchronous training, or false.
function options.read()
  local parallel, simulate = text_of "LUATRAIN_PARALLEL", text_of "LUATRAIN_SIMULATE"
  if not parallel then
    if simulate then refuse "--simulate requires --parallel async=RULE" end
    return false
  end
  local o = read_parallel(parallel)
  if simulate then
    for key, value in pairs(read_simulate(simulate)) do o[key] = value end
  elseif not core.joins_async() then
    refuse "--parallel async=RULE requires ranks (--ranks N, mpirun) or --simulate"
  end
  return o
end

-- Reads the steps of an asynchronous run from its metrics.jsonl. Returns a list with worker, ticket
-- and read of each step in turn, and the number of workers.
function options.read_trace(path)
  local steps, workers = {}, 0
  local ok, events = pcall(log.read, path)
  if not ok then refuse("--simulate: %s", events) end
  for event in events do
    if event.event == "step" then
      local n = #steps // 3 + 1
      if not (event.worker and event.ticket and event.delay) then
        refuse("--simulate: %s is not the metrics.jsonl of an asynchronous run", path)
      elseif event.step ~= n then
        refuse("--simulate: %s has step %s where step %d is expected", path, event.step, n)
      end
      for _, key in ipairs{"worker", "ticket", "delay"} do
        if math.type(event[key]) ~= "integer" or event[key] < 0 or event.worker >= MOST_WORKERS then
          refuse("--simulate: step %d of %s has an invalid %s, %s", n, path, key, event[key])
        end
      end
      steps[#steps + 1] = event.worker
      steps[#steps + 1] = event.ticket
      steps[#steps + 1] = event.step - 1 - event.delay
      workers = math.max(workers, event.worker + 1)
    end
  end
  if workers == 0 then refuse("--simulate: %s has no steps of an asynchronous run", path) end
  return steps, workers
end

return options
