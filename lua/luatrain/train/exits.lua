-- exits.lua - os.exit(), which ends a process without an error that anybody could catch.
--
-- A run that is open then writes its end line. On one of several ranks, os.exit() raises an error
-- that pcall does not catch. os.exit(0) ends that rank alone, and os.exit(7) the whole job.

local core = ...

local exits = {}

local exit = os.exit
local runs = setmetatable({}, {__mode = "k"})     -- those that were begun

-- The number that the process would end with; nil: os.exit does not take this.
local function number_of(code)
  if code == nil or code == true then return 0 end
  if code == false then return 1 end
  local number = math.tointeger(code)
  return number and number & 0xff
end

-- The run's __exit is called with the code when the script ends the process. It does nothing when
-- the run is over.
function exits.add(run) runs[run] = true end

function os.exit(code, ...)
  local number = number_of(code)
  for run in pairs(number and runs or {}) do pcall(getmetatable(run).__exit, run, number) end
  exit(code, ...)
end

local left                     -- the text of the error by which this rank leaves

local function exit_rank(code, ...)
  local number = number_of(code)
  if not number then return exit(code, ...) end
  local call = number == 0 and "os.exit()" or ("os.exit(%d)"):format(number)
  left = ("rank %d has called %s"):format((core.rank()), call)
  if number == 0 then core.fail("EDONE", left) end
  core.exit(number, left)
end

-- Returns what pcall has returned, or raises the error by which a rank leaves again.
local function pass_on(ok, ...)
  if not ok and left and tostring((...)):find(left, 1, true) then error((...), 0) end
  return ok, ...
end

-- Makes os.exit() of this Lua state, a rank's, end the whole run.
function exits.begin_rank()
  local call, call_with_handler, resume = pcall, xpcall, coroutine.resume
  os.exit = exit_rank
  function pcall(...) return pass_on(call(...)) end
  function xpcall(...) return pass_on(call_with_handler(...)) end
  function coroutine.resume(...) return pass_on(resume(...)) end
end

return exits
