-- profile.lua - runs a script until the profile of its net is complete, for a pipeline. The program
-- does this before the training, in a Lua state of its own.

local core = ...
local bench = require "luatrain.commands.bench"
local exits = require "luatrain.train.exits"
local json = require "luatrain.json"
local module = require "luatrain.api.module"

local profile = {}

local ROWS = 8                 -- images per batch in a dry profile

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
-- layer that the script freezes before it is part of the net has another name in result.params.
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
    if not known[unit.name] then unit.name = of[i] or unit.name end
  end
end

-- Prepares a profile of `passes` timed passes over batches of `rows` images; passes = 0: a dry one.
-- rank and ranks: this rank of the job, from 0, and the number of ranks. Then come the arguments of
-- the command line. Returns the index of the script among them, and a function to call after the
-- script, which returns the profile as JSON, or {"exit": {"code": 3, "text": "t.lua:9: the
-- script called os.exit(3)"}} if that ended the script before the profile was complete.
function profile.attach(passes, rows, rank, ranks, ...)
  passes, rows = math.tointeger(passes), math.tointeger(rows)
  rows = rows > 0 and rows or ROWS
  local words, folder, batch, out, resume, optims, net = {...}, bench.temporary_folder()
  local skipped = words[1] == "bench" and bench.script_index(table.unpack(words, 2)) or 0
  print = function() end
  io.output "/dev/null"
  exits.begin_profile()
  core.open_profile(passes, math.tointeger(rank), math.tointeger(ranks))
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
  return 4 + skipped + 1, function()
    bench.remove_folder(folder)
    local result = core.profile()
    if not result and exits.of_profile then
      return json.text{exit = exits.of_profile}
    elseif not result then
      core.fail("EUSAGE", "--parallel pipe=P: the script ended before a backward pass, so there "
                          .. "is no net to divide")
    end
    add_names(result, net)
    result.batch, result.out, result.resume = batch or core.profile_batch, out, resume or nil
    result.rows = math.min(rows, result.batch or rows)
    result.slot_bytes = passes > 0 and slot_bytes(optims) or nil
    result.optimizer = core.times().optimizer / math.max(passes, 1)
    return json.text(result)
  end
end

return profile
