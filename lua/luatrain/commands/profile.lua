-- profile.lua - runs a script until the profile of its net is complete, for a pipeline. The program
-- does this before the training, in a Lua state of its own.

local core = ...
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"

local profile = {}

local ROWS = 8                 -- images per batch in a dry profile

-- Prepares a profile of `passes` timed passes over batches of `rows` images; passes = 0: a dry one.
-- Then come the arguments of the command line. Returns the index of the script among them, and a
-- function to call after the script, which returns the profile as JSON.
function profile.attach(passes, rows, ...)
  passes, rows = math.tointeger(passes), math.tointeger(rows)
  rows = rows > 0 and rows or ROWS
  local words, folder, batch, out = {...}, bench.temporary_folder(), nil, nil
  local skipped = words[1] == "bench" and bench.script_index(table.unpack(words, 2)) or 0
  print = function() end
  io.output "/dev/null"
  core.open_profile(passes)
  core.profile_rows = rows
  core.on_run = function(settings)
    batch, out = settings.batch, settings.out_is_the_scripts and settings.out or nil
    settings.amp = settings.amp == "auto" and "off" or settings.amp
    bench.change(settings, passes + 1, folder)
    settings.batch = math.min(settings.batch, rows)
    for _, stage in ipairs(settings.stages) do stage.batch = math.min(stage.batch, rows) end
    return false
  end
  return 2 + skipped + 1, function()
    bench.remove_folder(folder)
    local result = core.profile()
    if not result then
      core.fail("ESCRIPT", "--parallel pipe=P: the script ended before a backward pass, so there "
                           .. "is no net to divide")
    end
    result.batch, result.out = batch or core.profile_batch, out
    result.rows = math.min(rows, result.batch or rows)
    result.optimizer = core.times().optimizer / math.max(passes, 1)
    return json.text(result)
  end
end

return profile
