-- exits.lua - replaces os.exit(), so that open runs write their end lines before the process ends.
--
-- On one of several ranks, and in a profile, os.exit() raises an error that pcall does not catch.
-- On a rank, os.exit(0) ends only that rank, another code such as os.exit(7) the whole job. While
-- ranks train asynchronously, the others cannot continue without rank 0, so os.exit(0) on it is an
-- error.

local core = ...

-- is_server: whether this rank is rank 0 of asynchronous training that has begun; see async.lua
-- of_profile: {code = , text = } of the os.exit() that ended a profile, or false
local exits = {is_server = function() return false end, of_profile = false}

local exit = os.exit
local runs = setmetatable({}, {__mode = "k"})     -- all runs that have begun -> true

-- The exit code of the process for an argument of os.exit; nil if the argument is invalid.
local function number_of(code)
  if code == nil or code == true then return 0 end
  if code == false then return 1 end
  local number = math.tointeger(code)
  return number and number & 0xff
end

-- Registers a run: os.exit() calls its __exit with the exit code. __exit does nothing if the run is
-- over.
function exits.add(run) runs[run] = true end

-- Whether there is a run that is not over.
function exits.has_open_run()
  for run in pairs(runs) do
    if run.status ~= "over" then return true end
  end
  return false
end

function os.exit(code, ...)
  local number = number_of(code)
  for run in pairs(number and runs or {}) do pcall(getmetatable(run).__exit, run, number) end
  exit(code, ...)
end

local left                     -- message of the error by which this Lua state exits

local function exit_rank(code, ...)
  local number = number_of(code)
  if not number then return exit(code, ...) end
  local call = number == 0 and "os.exit()" or ("os.exit(%d)"):format(number)
  left = ("rank %d called %s"):format((core.rank()), call)
  if number == 0 and exits.is_server() then
    core.fail("EPEER", left .. ", but the other ranks cannot train without it; to end early, "
              .. "leave the loop over run:epochs() instead")
  end
  if number == 0 then core.fail("EDONE", left) end
  core.exit(number, left)
end

-- Ends a script that is profiled; see luatrain/commands/profile.lua.
local function exit_profile(code, ...)
  local number = number_of(code)
  if not number then return exit(code, ...) end
  left = ("%sthe script called os.exit(%s)"):format(core.where(), number > 0 and number or "")
  exits.of_profile = {code = number, text = left}
  core.fail("EDONE", left)
end

-- Returns the results of pcall, or raises the exit error again.
local function pass_on(ok, ...)
  if not ok and left and tostring((...)):find(left, 1, true) then error((...), 0) end
  return ok, ...
end

local function begin(exit_state)
  local call, call_with_handler, resume = pcall, xpcall, coroutine.resume
  os.exit = exit_state
  function pcall(...) return pass_on(call(...)) end
  function xpcall(...) return pass_on(call_with_handler(...)) end
  function coroutine.resume(...) return pass_on(resume(...)) end
end

-- Makes os.exit() in this Lua state, of a rank or a profile, work as described above.
function exits.begin_rank() begin(exit_rank) end
function exits.begin_profile() begin(exit_profile) end

return exits
