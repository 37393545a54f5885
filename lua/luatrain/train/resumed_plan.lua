-- resumed_plan.lua - the number of micro-batches of a run that resumes. Its results depend on this
-- number, and the planner may choose another one each time, so it is read from the run's plan.json.

local core = ...
local checkpoint = require "luatrain.train.checkpoint"
local command_line = require "luatrain.command_line"
local json = require "luatrain.json"
local MOST = require "luatrain.train.parallel".MOST

local LONGEST = 1 << 20        -- bytes of a plan.json

-- The number of micro-batches in a plan.json; nil if there is no such file. EFILE if it cannot be
-- read.
local function micro_in(path)
  local function reject(...)
    core.fail("EFILE", ("%s: %s; remove the file, and set micro=M in --parallel to the "
                        .. "number of micro-batches of that run"):format(path, string.format(...)))
  end
  local file, why = core.open_plain(path, "r")
  if not file and not why then return nil end
  if not file then reject("cannot be read: %s", why:sub(#path + 3)) end
  local text, failure = file:read(LONGEST + 1)
  file:close()
  if failure then reject("cannot be read: %s", failure) end
  if text and #text > LONGEST then reject("the file is longer than 1 MiB") end
  local ok, plan = pcall(json.read, text or "")
  if not ok then reject "it is not the JSON of a plan" end
  local micro = type(plan) == "table" and plan.micro
  if math.type(micro) ~= "integer" or micro < 1 or micro > MOST then
    reject("micro must be an integer from 1 to %d", MOST)
  end
  return micro
end

-- Returns the number of micro-batches of a run, nil if it is free, and a warning or nil. micro: the
-- number that the user has set, or nil. out, resume: the settings of the run.
return function(micro, out, resume)
  local from = resume
  if resume == "auto" then from = out or checkpoint.newest_folder(command_line.script()) end
  local folder = from and resume ~= "never" and checkpoint.folder_of(from)
  if not folder then return micro end
  local path = folder .. "/plan.json"
  local earlier = micro_in(path)
  if not micro and not earlier then
    return nil, ("%s is missing, so this run may have another number of micro-batches than the "
                 .. "one that it resumes, and other results"):format(path)
  elseif micro and earlier and micro ~= earlier then
    return micro, ("%s was made with micro=%d, but now it is %d"):format(path, earlier, micro)
  end
  return micro or earlier
end
