-- processes.lua - runs other programs, for the scripts in tools/ that measure or check in separate
-- processes.
local json = require "luatrain.json"

local processes = {}

-- The path of the running program, luatrain.
function processes.program()
  local file <close> = assert(io.open("/proc/self/cmdline", "rb"))
  return file:read "a":match "^[^\0]*"
end

function processes.quote(word) return "'" .. tostring(word):gsub("'", "'\\''") .. "'" end

-- A command line for a shell: the quoted words, then --name=value for each option, or --name if its
-- value is true. Leaves out options that are false.
function processes.command(words, options)
  local list = {}
  for i, word in ipairs(words) do list[i] = processes.quote(word) end
  for name, value in pairs(options or {}) do
    if value == true then
      list[#list + 1] = "--" .. name
    elseif value then
      list[#list + 1] = processes.quote(("--%s=%s"):format(name, value))
    end
  end
  return table.concat(list, " ")
end

-- Runs a command and returns its last line of output, parsed as JSON. Returns nil and the exit code
-- if the command fails, which prints its own error, or if the line is not a JSON object.
function processes.call(words, options)
  local pipe = assert(io.popen(processes.command(words, options), "r"))
  local last = ""
  for line in pipe:lines() do last = line end
  local ok, result = pcall(json.read, last)
  local done, _, code = pipe:close()
  if done and ok and type(result) == "table" then return result end
  return nil, code
end

return processes
