-- exits.lua - os.exit(), which ends a process without an error that anybody could catch.
--
-- A run that is open then writes its end line. On one of several ranks, os.exit(0) ends that rank
-- alone, and os.exit(7) the whole job, as an error does.

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

local function exit_rank(code, ...)
  local number = number_of(code)
  if not number then return exit(code, ...) end
  if number == 0 then core.fail("EDONE", ("rank %d has called os.exit()"):format(core.rank())) end
  core.exit(number, ("rank %d has called os.exit(%d)"):format(core.rank(), number))
end

-- Makes os.exit() of this Lua state, a rank's, end the whole run.
function exits.begin_rank() os.exit = exit_rank end

return exits
