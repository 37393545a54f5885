-- processes.lua - other programs, for the scripts of tools/ that measure and check in processes of
-- their own.
local json = require "luatrain.json"

local processes = {}

-- This very program.
function processes.program()
  local file <close> = assert(io.open("/proc/self/cmdline", "rb"))
  return file:read "a":match "^[^\0]*"
end

function processes.quote(word) return "'" .. tostring(word):gsub("'", "'\\''") .. "'" end

-- The words of a command as a shell reads them; then --name=value for each option, or --name for
-- true.
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

-- What a command says last, one line of JSON; nil and its exit code when it fails, of which it has
-- said why, or says something else.
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
