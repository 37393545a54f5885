-- processes.lua - runs other programs, for the scripts in tools/ that measure or check in separate
-- processes.
local json = require "luatrain.json"
local sorted = require "luatrain.keys"

local processes = {}

-- The path of the running program, luatrain.
function processes.program()
  local file <close> = assert(io.open("/proc/self/cmdline", "rb"))
  return file:read "a":match "^[^\0]*"
end

-- The word for a shell, in quotes if it needs them.
function processes.quote(word)
  word = tostring(word)
  if word:find "^[%w_./:=,+-]+$" then return word end
  return "'" .. word:gsub("'", "'\\''") .. "'"
end

-- A command line for a shell: the quoted words, then --name=value for each option, or --name if its
-- value is true. Leaves out options that are false.
function processes.command(words, options)
  local list = {}
  for i, word in ipairs(words) do list[i] = processes.quote(word) end
  for _, name in ipairs(sorted(options or {})) do
    local value = options[name]
    if value == true then
      list[#list + 1] = "--" .. name
    elseif value then
      list[#list + 1] = processes.quote(("--%s=%s"):format(name, value))
    end
  end
  return table.concat(list, " ")
end

-- Prints the command for the measurements or checks that a tool did not reach. tools/gpu_first
-- repeats these lines.
function processes.print_rest(words, options)
  local build = os.getenv "BUILD"
  if build then words = {"env", "BUILD=" .. build, table.unpack(words)} end
  print("not reached: " .. processes.command(words, options))
end

-- Runs a command and returns its last line of output, parsed as JSON. Returns nil and the exit code
-- if the command fails, which prints its own error, or if the line is not a JSON object. The third
-- result is then the last line, if it is one.
function processes.call(words, options)
  local pipe = assert(io.popen(processes.command(words, options), "r"))
  local last = ""
  for line in pipe:lines() do last = line end
  local ok, result = pcall(json.read, last)
  local done, how, code = pipe:close()
  if how == "signal" then code = 128 + code end
  result = ok and type(result) == "table" and result or nil
  if done and result then return result end
  return nil, code, result
end

return processes
