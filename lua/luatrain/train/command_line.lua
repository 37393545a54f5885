-- command_line.lua - the command line of this process: the name of its script, and the command that
-- resumes a run.

local command_line = {}

-- luatrain's own options for a run, and whether each takes a value.
command_line.options = {
  ["--out"] = true, ["--resume"] = true, ["--save-every"] = true, ["--max-steps"] = true,
  ["--log"] = true, ["--seed"] = true, ["--threads"] = true, ["--device"] = true,
  ["--amp"] = true, ["--ranks"] = true, ["--wire"] = true, ["--timeout"] = true,
  ["--sums"] = true, ["--trace"] = true, ["--vranks"] = true, ["--deterministic"] = false,
  ["--tf32"] = false,
  ["--check-sync"] = true, ["--amp-check"] = true, ["--quiet"] = false, ["--verbose"] = false}

-- The arguments of this process, the program first. Not from `arg`, which a script may change.
local function arguments()
  local list = {}
  local file = io.open("/proc/self/cmdline", "rb")
  if file then
    for text in file:read "a":gmatch "([^\0]*)\0" do list[#list + 1] = text end
    file:close()
  end
  return list
end

-- The index in list of the last argument before the script; nil if the program is not luatrain but
-- a Lua interpreter that required luatrain.
local function last_option(list)
  if (list[1] or ""):match "[^/]*$" ~= "luatrain" then return nil end
  local i = 2
  while list[i] and list[i]:find "^%-." do
    i = i + ((command_line.options[list[i]] == false or list[i]:find "=") and 1 or 2)
  end
  return i - 1
end

-- The name of the script without folder and extension; "stdin" for "-".
function command_line.script()
  local list = arguments()
  local last = last_option(list)
  local path = last and list[last + 1] or not last and type(arg) == "table" and arg[0]
  if path == "-" then return "stdin" end
  return (tostring(path or "run"):match "[^/]*$":gsub("%.lua$", ""))
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
  local list = arguments()
  for i = 2, last_option(list) or 0 do
    if names_option(list[i], name) then return true end
  end
  return false
end

-- Removes `--name VALUE` or `--name=VALUE` from the options in list[2..last]. Returns the new last.
local function drop(list, last, name)
  for i = last, 2, -1 do
    if names_option(list[i], name) then
      local n = list[i] == name and 2 or 1
      for _ = 1, n do table.remove(list, i) end
      last = last - n
    end
  end
  return last
end

local function insert(list, name, value)
  table.insert(list, 2, value)
  table.insert(list, 2, name)
end

-- The command that resumes this process's run. out: the folder for --out, nil if the script sets it
-- itself. resume: the run's setting. without: an option to leave out, or nil.
function command_line.line(out, resume, without)
  local list = arguments()
  local last = last_option(list)
  if not last then
    if resume then table.insert(list, 1, "LUATRAIN_RESUME=auto") end
    if out then table.insert(list, 1, "LUATRAIN_OUT=" .. out) end
  else
    for _, name in ipairs{"--out", "--resume", without} do last = drop(list, last, name) end
    if resume and resume ~= "auto" then insert(list, "--resume", "auto") end
    if out then insert(list, "--out", out) end
  end
  for i, text in ipairs(list) do list[i] = quote(text) end
  local launch = os.getenv "LUATRAIN_LAUNCH"       -- as in "-n 4": see tools/launch.c
  if last and launch then table.insert(list, 2, "launch " .. launch) end
  return table.concat(list, " ")
end

return command_line
