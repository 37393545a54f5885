-- async_options.lua - the options of asynchronous training: --parallel async=RULE and --simulate.

local core = ...
local items = require "luatrain.train.parallel_items"

local options = {}

options.MOST_WORKERS = 4096

local NO_LAM = {asgd = true, sa = true, gap = true, dana = true, ormo = true}

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

local function text_of(name)
  local text = os.getenv(name)
  return text ~= "" and text or nil
end

-- ==== --parallel =================================================================================

local function lam_of(text)
  local value = tonumber(text)
  if not value or not (value > 0 and value < math.huge) then
    refuse("--parallel: lam must be a number above 0, but is '%s'", text)
  end
  return value
end

local READ = {
  async = function(text) return text end,
  staleness = function(text) return items.integer("staleness", text, 0) end,
  drop = function(text) return items.integer("drop", text, 1) end,
  lam = lam_of,
}
local KEYS = {"async", "staleness", "drop", "lam"}
local FORM = "async=RULE[,staleness=S][,drop=R][,lam=L]"

-- "async=ddc,staleness=8,drop=16" as {rule = "ddc", staleness = 8, drop = 16}
local function read_parallel(text)
  if not text:find "^async=[^,]" then
    refuse("--parallel must begin with async=RULE or pipe=P, but is '%s'", text)
  end
  local o = items.read(text, FORM, KEYS, READ, {})
  o.rule, o.async = o.async, nil
  if o.lam and NO_LAM[o.rule] then
    refuse("--parallel: the rule %s has no lam; dc-a, dc-c, dc-m, ddc have one", o.rule)
  end
  return o
end

-- ==== --simulate =================================================================================

local function workers_of(text)
  local value = math.tointeger(tonumber(text))
  if not value or value < 1 or value > options.MOST_WORKERS then
    refuse("--simulate: the number of workers must be from 1 to %d, but is %s",
           options.MOST_WORKERS, text)
  end
  return value
end

local function sigma_of(text)
  local value = tonumber(text)
  if not value or not (value >= 0 and value <= 10) then
    refuse("--simulate: sigma must be from 0 to 10, but is %s", text)
  end
  return value
end

local function time_of(text)
  local value = tonumber(text)
  if not value or not (value >= 1e-9 and value <= 1e9) then
    refuse("--simulate: '%s' is not a time from 1e-9 to 1e9 seconds", text)
  end
  return value
end

-- "workers=4,delay=lognormal:0.2:1,1,2" as {workers = 4, sigma = 0.2, times = {1, 1, 2}};
-- "trace:FILE" as {trace = FILE}
local function read_simulate(text)
  local file = text:match "^trace:(.+)$"
  if file then return {trace = file} end
  local workers, sigma, list = text:match "^workers=([^,]*),delay=lognormal:([^:]*)(.*)$"
  if not workers then
    refuse("--simulate must be workers=N,delay=lognormal:SIGMA[:T1,T2,...] or trace:FILE, but is "
           .. "'%s'", text)
  end
  local o = {workers = workers_of(workers), sigma = sigma_of(sigma), times = {}}
  for item in items.of(list:sub(2)) do
    if list ~= "" then o.times[#o.times + 1] = time_of(item) end
  end
  return o
end

-- Returns the options of asynchronous training: {rule =, staleness =, drop =, lam =}, with workers,
-- sigma and times for a simulation, or trace, a path, for a replay. False without --parallel.
function options.read()
  local parallel, simulate = text_of "LUATRAIN_PARALLEL", text_of "LUATRAIN_SIMULATE"
  if not parallel then
    if simulate then refuse "--simulate requires --parallel async=RULE" end
    return false
  end
  if parallel:find "^pipe=" then return false end
  local o = read_parallel(parallel)
  if simulate then
    for key, value in pairs(read_simulate(simulate)) do o[key] = value end
  elseif not core.joins_async() then
    refuse "--parallel async=RULE requires ranks (--ranks N, mpirun) or --simulate"
  end
  return o
end

return options
