-- pipe_options.lua - the options of training in a pipeline: --parallel pipe=P.

local core = ...
local hint = require "luatrain.check".hint
local items = require "luatrain.train.parallel_items"

local options = {}

local FORM = "pipe=P|auto[,data=G][,micro=M][,cut=NAME...][,schedule=KIND][,lag=N][,memory=GB]"
local SCHEDULES = core.schedules()

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

options.MOST = 1024            -- for all integers

local function integer_of(key, text, least)
  return items.integer(key, text, least, options.MOST)
end

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

local READ = {
  pipe = function(text) return text == "auto" and 0 or integer_of("pipe", text, 1) end,
  data = function(text) return integer_of("data", text, 1) end,
  micro = function(text) return integer_of("micro", text, 1) end,
  lag = function(text) return integer_of("lag", text, 0) end,
  cut = function(text) return text end,
  schedule = schedule_of,
  memory = memory_of,
}
local KEYS = {"pipe", "data", "micro", "cut", "lag", "schedule", "memory"}

local function plural(n, what) return ("%d %s%s"):format(n, what, n == 1 and "" or "s") end

-- Returns the options of a job of `ranks` ranks: {pipe = stages, data = replicas, micro =, cut = a
-- list, schedule =, lag =, memory = bytes of a rank}. The planner chooses what is nil.
function options.read(ranks)
  local text = os.getenv "LUATRAIN_PARALLEL" or ""
  text = text ~= "" and text or "pipe=auto"
  local o = items.read(text, FORM, KEYS, READ, {cut = true})
  if not o.pipe then
    refuse("--parallel must have pipe=P or pipe=auto, but is '%s'", text)
  elseif o.schedule == "gpipe" and (o.lag or 0) > 0 then
    refuse("--parallel: gpipe has no lag, but '%s' has", text)
  elseif o.pipe == 0 then
    if o.data or #o.cut > 0 then
      refuse("--parallel: with pipe=auto, the planner chooses %s; remove it from '%s'",
             o.data and "data" or "cut", text)
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
  return o
end

-- ==== Cuts =======================================================================================

-- Whether a cut names this parameter, or a module that contains it.
local function is_at(cut, name) return name == cut or name:sub(1, #cut + 1) == cut .. "." end

-- The whole name of the first module or parameter whose own name is `own`, or nil.
local function whole_name(names, own)
  for _, name in ipairs(names) do
    local _, dot = ("." .. name .. "."):find("." .. own .. ".", 1, true)
    if dot then return name:sub(1, dot - 2) end
  end
end

-- Reads a list of {name =, unit =} of the profile. Returns the first unit that has a parameter of
-- the cut, from 1, and whether the list has one. Appends all names to `names`.
local function search(list, cut, names)
  local first, exists = nil, false
  for _, param in ipairs(list) do
    local is_here = is_at(cut, param.name)
    if is_here and param.unit > 0 then first = math.min(first or param.unit, param.unit) end
    exists = exists or is_here
    names[#names + 1] = param.name
  end
  return first, exists
end

-- The first unit that has a parameter of the cut, from 1.
local function unit_of(profile, cut)
  local names = {}
  local first, exists = search(profile.names, cut, names)
  if not exists then first, exists = search(profile.params, cut, names) end
  if first then
    return first
  elseif exists then
    refuse("--parallel: a stage cannot begin at %s, which the forward pass does not use", cut)
  end
  for _, module in ipairs(profile.modules) do
    if module == cut then
      refuse("--parallel: a stage cannot begin at %s, which has no parameters; name a parameter or "
             .. "a module that has one", cut)
    end
  end
  local whole = whole_name(names, cut)
  refuse("--parallel: the net has no parameter or module '%s'%s", cut,
         whole and (" (did you mean '%s'?)"):format(whole) or hint(cut, names, ""))
end

-- Returns the first unit of each stage after stage 0. cuts: the list of the options.
function options.cuts(profile, cuts)
  local first, before = {}, 1
  for i, cut in ipairs(cuts) do
    local unit = unit_of(profile, cut)
    if unit <= before then
      refuse("--parallel: cut=%s is not after %s in the forward pass", cut,
             i == 1 and "the first parameter" or "cut=" .. cuts[i - 1])
    elseif not profile.units[unit].may_begin_stage then
      refuse("--parallel: a stage cannot begin at %s, because a parameter of an earlier stage is "
             .. "used again after it", cut)
    end
    first[i], before = unit, unit
  end
  return first
end

return options
