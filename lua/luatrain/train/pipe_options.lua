-- pipe_options.lua - the options of training in a pipeline: --parallel pipe=P.

local core = ...
local hint = require "luatrain.check".hint
local items = require "luatrain.train.parallel_items"

local options = {}

local FORM = "pipe=P|auto[,data=G][,micro=M][,cut=NAME...][,schedule=KIND][,lag=N]"
local SCHEDULES = {"gpipe", "1f1b", "zb"}

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

local MOST = 1024

local function integer_of(key, text, least) return items.integer(key, text, least, MOST) end

local function schedule_of(text)
  for _, name in ipairs(SCHEDULES) do
    if name == text then return text end
  end
  refuse("--parallel: schedule must be %s, but is '%s'%s", "gpipe, 1f1b or zb", text,
         hint(text, SCHEDULES, ""))
end

local READ = {
  pipe = function(text) return text == "auto" and 0 or integer_of("pipe", text, 1) end,
  data = function(text) return integer_of("data", text, 1) end,
  micro = function(text) return integer_of("micro", text, 1) end,
  lag = function(text) return integer_of("lag", text, 0) end,
  cut = function(text) return text end,
  schedule = schedule_of,
}
local KEYS = {"pipe", "data", "micro", "cut", "lag", "schedule"}

local function plural(n, what) return ("%d %s%s"):format(n, what, n == 1 and "" or "s") end

-- Returns the options {pipe = stages, data = replicas, micro =, cut = a list, schedule =, lag =} of
-- the ranks of this job. The planner chooses what is nil.
function options.read()
  local text = os.getenv "LUATRAIN_PARALLEL" or "pipe=auto"
  local o = items.read(text, FORM, KEYS, READ, {cut = true})
  local _, ranks = core.rank()
  if o.pipe == 0 then
    if o.data or #o.cut > 0 then
      refuse("--parallel: pipe=auto chooses %s itself, but '%s' has it", o.data and "data" or "cut",
             text)
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
    refuse("--parallel: %s require %s, but '%s' has %d", plural(o.pipe, "stage"),
           plural(o.pipe - 1, "cut"), text, #o.cut)
  end
  o.data = ranks // o.pipe
  return o
end

return options
