-- command_line.lua - the command line of this process: the name of its script, the command that
-- resumes a run, and the command that joins a job.

local command_line = {}

command_line.options = {}      -- luatrain's own options: "--seed" -> true

local words, last = {}, nil    -- the command line; the index of its last word before the script

-- The program luatrain calls this before a script runs. Another program, such as a Lua interpreter
-- that requires luatrain, does not; then the process's own command line is used.
function command_line.set(list, index, options)
  words, last, command_line.options = list, index, options
end

-- A copy of the command line, the program first. Not from `arg`, which a script may change.
local function arguments()
  if last then return table.move(words, 1, #words, 1, {}) end
  local list = {}
  local file = io.open("/proc/self/cmdline", "rb")
  if file then
    for text in file:read "a":gmatch "([^\0]*)\0" do list[#list + 1] = text end
    file:close()
  end
  return list
end

-- The name of the script without folder and extension; "stdin" for "-".
function command_line.script()
  local path = last and words[last + 1] or not last and type(arg) == "table" and arg[0]
  if path == "-" then return "stdin" end
  return (tostring(path or "run"):match "[^/]*$":gsub("%.lua$", ""))
end

-- The text of an environment variable; nil if it is not set or empty.
function command_line.variable(name)
  local text = os.getenv(name)
  return text ~= "" and text or nil
end

-- Quotes text for a shell, if necessary.
local function quote(text)
  if text:find "^[%w_./:=,+@%%-]+$" then return text end
  return "'" .. text:gsub("'", "'\\''") .. "'"
end

local function names_option(text, name)
  return text == name or text:sub(1, #name + 1) == name .. "="
end

-- Whether luatrain was called with the option `name`.
function command_line.has(name)
  for i = 2, last or 0 do
    if names_option(words[i], name) then return true end
  end
  return false
end

-- Removes `--name VALUE` or `--name=VALUE` from the options in list[2..n]. Returns the new n.
local function drop(list, n, name)
  for i = n, 2, -1 do
    if names_option(list[i], name) then
      local count = list[i] == name and 2 or 1
      for _ = 1, count do table.remove(list, i) end
      n = n - count
    end
  end
  return n
end

local function insert(list, name, value)
  table.insert(list, 2, value)
  table.insert(list, 2, name)
end

-- The command that resumes this process's run. out: the folder for --out, nil if the script sets it
-- itself. resume: the run's setting. without: an option to leave out, or nil.
function command_line.line(out, resume, without)
  local list = arguments()
  if not last then
    if resume then table.insert(list, 1, "LUATRAIN_RESUME=auto") end
    if out then table.insert(list, 1, "LUATRAIN_OUT=" .. out) end
  else
    local n = last
    for _, name in ipairs{"--out", "--resume", without} do n = drop(list, n, name) end
    if resume and resume ~= "auto" then insert(list, "--resume", "auto") end
    if out then insert(list, "--out", out) end
  end
  for i, text in ipairs(list) do list[i] = quote(text) end
  local launch = os.getenv "LUATRAIN_LAUNCH"       -- as in "-n 4": see tools/launch.c
  if last and launch then table.insert(list, 2, "launch " .. launch) end
  return table.concat(list, " ")
end

-- The command of a worker that joins this job, with the same script and flags.
function command_line.join_line(address, key)
  local list = {"luatrain", "--join", address, "--key", key}
  if last then table.move(words, last + 1, #words, #list + 1, list) end
  for i, text in ipairs(list) do list[i] = quote(text) end
  return table.concat(list, " ")
end

return command_line
