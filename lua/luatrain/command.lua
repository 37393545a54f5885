-- command.lua - the command line that goes on with a run, for the message of one that stops.

-- The arguments of this process, the program first.
local function arguments()
  local list = {}
  local file = io.open("/proc/self/cmdline", "rb")
  if file then
    for text in file:read "a":gmatch "([^\0]*)\0" do list[#list + 1] = text end
    file:close()
  end
  return list
end

-- As a shell reads it.
local function quote(text)
  if text:find "^[%w_./:=,+@%%-]+$" then return text end
  return "'" .. text:gsub("'", "'\\''") .. "'"
end

-- Takes `--name VALUE` or `--name=VALUE` out of the options in list[2..last]. Returns the new last.
local function drop(list, last, name)
  for i = last, 2, -1 do
    if list[i] == name then
      table.remove(list, i + 1)
      table.remove(list, i)
      last = last - 2
    elseif list[i]:sub(1, #name + 1) == name .. "=" then
      table.remove(list, i)
      last = last - 1
    end
  end
  return last
end

local function insert(list, name, value)
  table.insert(list, 2, value)
  table.insert(list, 2, name)
end

-- This process's command with --out out (if the script does not say it itself), so that it goes on
-- instead of starting anew. The option `without` is left out.
return function(out, resume, without)
  local list = arguments()
  if (list[1] or ""):match "[^/]*$" ~= "luatrain" then     -- a Lua that required luatrain
    if resume then table.insert(list, 1, "LUATRAIN_RESUME=auto") end
    if out then table.insert(list, 1, "LUATRAIN_OUT=" .. out) end
  else
    local last = #list - #arg - 1                          -- the script is after it
    for _, name in ipairs{"--out", "--resume", without} do last = drop(list, last, name) end
    if resume and resume ~= "auto" then insert(list, "--resume", "auto") end
    if out then insert(list, "--out", out) end
  end
  for i, text in ipairs(list) do list[i] = quote(text) end
  return table.concat(list, " ")
end
