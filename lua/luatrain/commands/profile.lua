-- profile.lua - runs a script until the profile of its net is complete, for a pipeline. The program
-- does this before the training, in a Lua state of its own: see tools/plan.c.

local core = ...
local bench = require "luatrain.commands.bench"
local bench_dist = require "luatrain.commands.bench_dist"
local exits = require "luatrain.train.exits"
local hint = require "luatrain.check".hint
local module = require "luatrain.api.module"
local read_options = require "luatrain.train.parallel".pipe
local resumed_micro = require "luatrain.train.resumed_plan"

local profile = {}

local ROWS = 8                 -- images per batch in a dry profile
local GIVEN_MICRO = 4          -- micro-batches if the planner does not choose them

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

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
local function cuts_of(profile, cuts)
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

-- ==== Results ====================================================================================

-- The bytes of the slots of a list of optimizers, or nil without a list.
local function slot_bytes(optims)
  local bytes = 0
  for _, optim in ipairs(optims or {}) do
    for name, slot in pairs(optim:state()) do
      if not name:find "^step" then bytes = bytes + 4 * slot:count() end
    end
  end
  return optims and bytes
end

-- Adds to a profile the names of the net, nil if it is unknown: result.names, a list like
-- result.params, with all names of shared tensors, and result.modules, the names of modules. A
-- layer that the script freezes before it is part of the net has another name in result.params;
-- its unit is renamed.
local function add_names(result, net)
  result.names, result.modules = {}, {}
  local known, of = {}, {}
  local names, values = {}, {}
  if net then names, values = module.contents(net) end
  for i, name in ipairs(names) do
    if core.is_tensor(values[i]) then
      local unit = core.profile_unit(values[i])
      result.names[#result.names + 1] = {name = name, unit = unit}
      known[name], of[unit] = true, of[unit] or name
    else
      result.modules[#result.modules + 1] = name
    end
  end
  for i, unit in ipairs(result.units) do
    if not known[unit.name] and of[i] then core.profile_rename(i, of[i]) end
  end
end

-- Sets what the options o do not give, for a training run. If they name all cuts, the planner is
-- not asked: o.given.
local function complete(o, out, resume)
  if (core.job_rank()) == 0 then o.micro, o.text = resumed_micro(o.micro, out, resume) end
  if o.pipe and #o.cut == o.pipe - 1 and not o.memory then
    o.given, o.schedule = true, o.schedule or "zb"
    o.lag = o.lag or (o.schedule == "gpipe" and 0 or 1)
  end
  if o.given or o.pipe == 1 then o.micro = o.micro or GIVEN_MICRO end
end

-- The number of words of the command line before its script.
local function words_before_script(words)
  if words[1] ~= "bench" then return 0 end
  if words[2] ~= "dist" then return bench.script_index(table.unpack(words, 2)) end
  return 1 + bench_dist.script_index(table.unpack(words, 3))
end

-- Prepares a profile of `passes` timed passes over batches of `rows` images; passes = 0: a dry one.
-- trains: 1 if the script trains afterwards, 0 if it does not. Then come the arguments of the
-- command line. Returns the index of the script among them, and a function to call after the
-- script. That returns the options, see parallel.pipe(), with these fields:
--   exit, text      code and message of the os.exit() that ended the script before the profile was
--                   complete; then there is nothing else
--   batch           images of a batch; nil if they are unknown
--   rows            images of a batch of the profile
--   slot_bytes      of the optimizers; nil if they are unknown
--   optimizer       seconds of a step
--   first           the first unit of each stage that begins at a cut
--   given           the options are a whole plan
--   text            a warning, or nil
function profile.attach(passes, rows, trains, ...)
  passes, rows = math.tointeger(passes), math.tointeger(rows)
  rows = rows > 0 and rows or ROWS
  local o = read_options(select(2, core.job_rank()))
  local words, folder, batch, out, resume, optims, net = {...}, bench.temporary_folder()
  local function be_silent() print = function() end end
  if (core.job_rank()) > 0 then be_silent() end         -- one rank shows the help of bench
  local skipped = words_before_script(words)
  be_silent()
  io.output "/dev/null"
  exits.begin_profile()
  core.profile_rows = rows
  core.on_run = function(settings)
    batch, out, resume = settings.batch, settings.out, settings.resume
    net, optims = settings.net, settings.optims
    settings.amp = settings.amp == "auto" and "off" or settings.amp
    bench.change(settings, passes + 1, folder)
    settings.batch = math.min(settings.batch, rows)
    for _, phase in ipairs(settings.phases) do phase.batch = math.min(phase.batch, rows) end
    return false
  end
  return 3 + skipped + 1, function()
    bench.remove_folder(folder)
    local result = {}
    result.units, result.params = core.profile()
    if not result.units and exits.of_profile then
      return {exit = exits.of_profile.code, text = exits.of_profile.text}
    elseif not result.units then
      core.fail("EUSAGE", "--parallel pipe=P: the script ended before a backward pass, so there "
                          .. "is no net to divide")
    end
    add_names(result, net)
    o.batch = batch or core.profile_batch
    o.rows = math.min(rows, o.batch or rows)
    o.slot_bytes = passes > 0 and slot_bytes(optims) or nil
    o.optimizer = core.times().optimizer / math.max(passes, 1)
    if passes == 0 then o.first = cuts_of(result, o.cut) end
    if passes == 0 and trains == "1" then complete(o, out, resume) end
    return o
  end
end

return profile
