-- parallel.lua - reads the values of --parallel and --simulate. No other file does, except that
-- tools/options.c tells the modes apart.

local core = ...
local hint = require "luatrain.check".hint
local text_of = require "luatrain.command_line".variable

local parallel = {}

local SCHEDULES = core.schedules()
local NO_LAM = {asgd = true, sa = true, gap = true, dana = true, ormo = true}

parallel.MOST_WORKERS = 4096
parallel.MOST = 1024           -- for all integers of a pipeline

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

-- ==== Items ======================================================================================

-- Iterates over the items of "a,b,c".
local function items_of(text) return (text .. ","):gmatch "([^,]*)," end

-- The integer in text, from `least` to `most`, which may be nil.
local function integer_of(key, text, least, most)
  local value = math.tointeger(tonumber(text))
  if value and value >= least and value <= (most or value) then return value end
  local range = most and ("from %d to %d"):format(least, most) or ("of at least %d"):format(least)
  refuse("--parallel: %s must be an integer %s, but is '%s'", key, range, text)
end

-- Returns a table of the values by key. form: the allowed text; keys: the list of keys, for hints.
-- read[key](value) checks and converts a value; a key that is in lists may be repeated, and has the
-- list of its values.
local function read_items(text, form, keys, read, lists)
  local o = {}
  for key in pairs(lists) do o[key] = {} end
  for item in items_of(text) do
    local key, value = item:match "^([^=]+)=(.+)$"
    if not read[key] then
      refuse("--parallel must be %s, but has '%s'%s", form, item, key and hint(key, keys, "") or "")
    elseif lists[key] then
      table.insert(o[key], read[key](value))
    elseif o[key] then
      refuse("--parallel: %s is given twice in '%s'", key, text)
    else
      o[key] = read[key](value)
    end
  end
  return o
end

-- ==== --parallel pipe=P ==========================================================================

local PIPE_FORM = "pipe=P|auto[,data=G][,micro=M][,cut=NAME...][,schedule=KIND][,lag=N]"
                  .. "[,memory=GB][,delay=D]"

local function schedule_of(text)
  for _, name in ipairs(SCHEDULES) do
    if name == text then return text end
  end
  refuse("--parallel: schedule must be one of %s, but is '%s'%s", table.concat(SCHEDULES, ", "),
         text, hint(text, SCHEDULES, ""))
end

local function memory_of(text)
  local gigabytes = tonumber(text)
  if gigabytes and gigabytes > 0 and gigabytes <= 1e9 then return gigabytes * 1e9 end
  refuse("--parallel: memory must be a number of GB above 0 and at most 1e9, but is '%s'", text)
end

local READ_PIPE = {
  pipe = function(text)
    return text == "auto" and 0 or integer_of("pipe", text, 1, parallel.MOST)
  end,
  data = function(text) return integer_of("data", text, 1, parallel.MOST) end,
  micro = function(text) return integer_of("micro", text, 1, parallel.MOST) end,
  lag = function(text) return integer_of("lag", text, 0, parallel.MOST) end,
  cut = function(text) return text end,
  schedule = schedule_of,
  memory = memory_of,
  delay = function(text) return integer_of("delay", text, 0, 1) end,
}
local PIPE_KEYS = {"pipe", "data", "micro", "cut", "lag", "schedule", "memory", "delay"}

local function plural(n, what) return ("%d %s%s"):format(n, what, n == 1 and "" or "s") end

-- Returns the options of a job of `ranks` ranks: {pipe = stages, data = replicas, micro =, cut = a
-- list, schedule =, lag =, memory = bytes of a rank, delay = 1, or 0 or nil for none}. The planner
-- chooses what else is nil.
function parallel.pipe(ranks)
  local text = text_of "LUATRAIN_PARALLEL" or "pipe=auto"
  local o = read_items(text, PIPE_FORM, PIPE_KEYS, READ_PIPE, {cut = true})
  if not o.pipe then
    refuse("--parallel must have pipe=P or pipe=auto, but is '%s'", text)
  elseif o.schedule == "gpipe" and (o.lag or 0) > 0 then
    refuse("--parallel: gpipe has no lag, but '%s' has", text)
  elseif o.pipe == 0 then
    if o.data or #o.cut > 0 then
      refuse("--parallel: with pipe=auto, the planner chooses %s; remove it from '%s'",
             o.data and "data" or "cut", text)
    end
    if o.delay == 1 then
      refuse("--parallel: delay=1 requires pipe=P, because the planner may choose no pipeline; "
             .. "remove it from '%s', or find P with luatrain plan", text)
    end
    o.pipe = nil
    return o
  elseif ranks % o.pipe ~= 0 or o.data and o.data * o.pipe ~= ranks then
    local wanted = o.data and plural(o.data * o.pipe, "rank")
                   or ("a multiple of %s"):format(plural(o.pipe, "rank"))
    refuse("--parallel %s requires %s, but there %s %d; start them with --ranks or mpirun", text,
           wanted, ranks == 1 and "is" or "are", ranks)
  end
  if #o.cut > 0 and #o.cut ~= o.pipe - 1 then
    refuse("--parallel: pipe=%d requires %s, but '%s' has %d", o.pipe, plural(o.pipe - 1, "cut"),
           text, #o.cut)
  end
  o.data = ranks // o.pipe
  if o.delay == 1 and o.data == 1 then
    refuse("--parallel: delay=1 hides the sums over the replicas of a stage, but with %s, each "
           .. "stage of '%s' has only one; start more ranks, or remove it", plural(ranks, "rank"),
           text)
  end
  return o
end

-- ==== --parallel async=RULE ======================================================================

local function lam_of(text)
  local value = tonumber(text)
  if not value or not (value > 0 and value < math.huge) then
    refuse("--parallel: lam must be a number above 0, but is '%s'", text)
  end
  return value
end

local READ_ASYNC = {
  async = function(text) return text end,
  staleness = function(text) return integer_of("staleness", text, 0) end,
  drop = function(text) return integer_of("drop", text, 1) end,
  lam = lam_of,
}
local ASYNC_KEYS = {"async", "staleness", "drop", "lam"}
local ASYNC_FORM = "async=RULE[,staleness=S][,drop=R][,lam=L]"

-- "async=ddc,staleness=8,drop=16" as {rule = "ddc", staleness = 8, drop = 16}
local function read_async(text)
  if not text:find "^async=[^,]" then
    refuse("--parallel must begin with async=RULE or pipe=P, or be sync-server, but is '%s'", text)
  end
  local o = read_items(text, ASYNC_FORM, ASYNC_KEYS, READ_ASYNC, {})
  o.rule, o.async = o.async, nil
  if o.lam and NO_LAM[o.rule] then
    refuse("--parallel: the rule %s has no lam; dc-a, dc-c, dc-m, ddc have one", o.rule)
  end
  return o
end

-- ==== --simulate =================================================================================

local function workers_of(text)
  local value = math.tointeger(tonumber(text))
  if not value or value < 1 or value > parallel.MOST_WORKERS then
    refuse("--simulate: the number of workers must be from 1 to %d, but is %s",
           parallel.MOST_WORKERS, text)
  end
  return value
end

local function number_of(text, low, high, message)
  local value = tonumber(text)
  if not value or not (value >= low and value <= high) then refuse(message, text) end
  return value
end

local SIMULATE_FORM = "workers=N,delay=lognormal:SIGMA[:T1,T2,...][,link=GBIT1,GBIT2,...]"
                      .. "[,latency=US1,US2,...][,server=S[:GBIT]] or trace:FILE"
local SIMULATE_KEYS = {"workers", "delay", "link", "latency", "server"}

-- The list of the numbers in "1,0.1".
local function numbers_of(text, read)
  local list = {}
  for item in items_of(text) do list[#list + 1] = read(item) end
  return list
end

-- A rate in Gbit/s, as bytes per second.
local function rate_of(text)
  return number_of(text, 1e-6, 1e6, "--simulate: '%s' is not the rate of a link: from 1e-6 to 1e6 "
                                    .. "Gbit/s") * 1e9 / 8
end

-- Each function sets the options of a key in o.
local READ_SIMULATE = {
  workers = function(o, text) o.workers = workers_of(text) end,
  delay = function(o, text)
    local sigma, list = text:match "^lognormal:([^:]*)(.*)$"
    if not sigma then
      refuse("--simulate: delay must be lognormal:SIGMA[:T1,T2,...], but is '%s'", text)
    end
    o.sigma = number_of(sigma, 0, 10, "--simulate: sigma must be from 0 to 10, but is %s")
    o.times = list == "" and {} or numbers_of(list:sub(2), function(item)
      return number_of(item, 1e-9, 1e9, "--simulate: '%s' is not a time from 1e-9 to 1e9 seconds")
    end)
  end,
  link = function(o, text)
    o.rates = numbers_of(text, function(item)
      return item == "none" and math.huge or rate_of(item)
    end)
  end,
  latency = function(o, text)
    o.latencies = numbers_of(text, function(item)
      return number_of(item, 0, 1e9, "--simulate: '%s' is not a latency from 0 to 1e9 "
                                     .. "microseconds") * 1e-6
    end)
  end,
  server = function(o, text)
    local seconds, rate = text:match "^([^:]*):?(.*)$"
    o.service = number_of(seconds, 0, 1e9, "--simulate: '%s' is not a time of the server from 0 to "
                                           .. "1e9 seconds")
    if text:find ":" then o.server_rate = rate_of(rate) end
  end,
}

-- "workers=4,link=1,0.1" as {workers = "4", link = "1,0.1"}: an item without a key belongs to the
-- list of the key before it.
local function split_simulate(text)
  local o, last = {}, nil
  for item in items_of(text) do
    local key, value = item:match "^(%a+)=(.*)$"
    if not key and last then
      o[last] = o[last] .. "," .. item
    elseif not READ_SIMULATE[key] then
      refuse("--simulate must be %s, but is '%s'%s", SIMULATE_FORM, text,
             key and hint(key, SIMULATE_KEYS, "") or "")
    elseif o[key] then
      refuse("--simulate: %s is given twice in '%s'", key, text)
    else
      last, o[key] = key, value
    end
  end
  return o
end

-- "workers=4,delay=lognormal:0.2:1,1,2" as {workers = 4, sigma = 0.2, times = {1, 1, 2}}, with
-- rates, latencies, service and server_rate in bytes and seconds; "trace:FILE" as {trace = FILE}
local function read_simulate(text)
  local file = text:match "^trace:(.+)$"
  if file then return {trace = file} end
  local items = split_simulate(text)
  if not items.workers or not items.delay then
    refuse("--simulate must be %s, but is '%s'", SIMULATE_FORM, text)
  end
  local o = {rates = {}, latencies = {},
             has_messages = (items.link or items.latency or items.server) and true or false}
  for _, key in ipairs(SIMULATE_KEYS) do
    if items[key] then READ_SIMULATE[key](o, items[key]) end
  end
  return o
end

-- Returns the options of asynchronous training: {rule =, staleness =, drop =, lam =}. A simulation
-- or a replay adds the options of read_simulate(). False without --parallel async=RULE.
function parallel.async()
  local text, simulate = text_of "LUATRAIN_PARALLEL", text_of "LUATRAIN_SIMULATE"
  if not text then
    if simulate then refuse "--simulate requires --parallel async=RULE or sync-server" end
    return false
  end
  if text:find "^pipe=" or text == "sync-server" then return false end
  local o = read_async(text)
  if simulate then
    for key, value in pairs(read_simulate(simulate)) do o[key] = value end
  elseif not core.joins_async() then
    refuse "--parallel async=RULE requires ranks (--ranks N, mpirun) or --simulate"
  end
  return o
end

-- ==== --parallel sync-server =====================================================================

-- Returns the options of a synchronous parameter server: what read_simulate() returns for a
-- simulation, else {}. False without --parallel sync-server.
function parallel.server()
  local simulate = text_of "LUATRAIN_SIMULATE"
  if text_of "LUATRAIN_PARALLEL" ~= "sync-server" then return false end
  if not simulate then
    local _, size = core.job_rank()
    if size > 1 then return {} end
    refuse "--parallel sync-server requires several ranks (--ranks N, mpirun) or --simulate"
  end
  local o = read_simulate(simulate)
  if o.trace then refuse "--simulate trace:FILE requires --parallel async=RULE" end
  return o
end

return parallel
