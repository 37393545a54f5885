-- args.lua - the flags of a script, declared by their defaults.
--
--   local opt = lt.args{data = "fashion-mnist", epochs = 3, lr = 0.05, verbose = false}
--
-- A default's type is the flag's: string, whole number, number, switch. --name value and
-- --name=value set one; --switch alone means true; a - in a flag stands for the _ of its name.
-- --help shows all. What is wrong is a usage error.

local core = ...
local check = require "luatrain.check"

local function script() return arg and arg[0] and arg[0]:match "[^/]*$" or "script" end
local function fail(...) core.fail("EUSAGE", script() .. ": " .. string.format(...)) end

local function flag_of(name) return "--" .. name:gsub("_", "-") end

local function sorted(defaults)
  local names = {}
  for name, value in pairs(defaults) do
    local kind = type(value)
    if type(name) ~= "string" or kind ~= "string" and kind ~= "number" and kind ~= "boolean" then
      core.fail("EINVAL", ("lt.args: the default of %s wants a string, a number or a boolean")
                :format(tostring(name)))
    end
    names[#names + 1] = name
  end
  table.sort(names)
  return names
end

-- text as a value of default's type.
local function convert(flag, text, default)
  if type(default) == "string" then return text end
  if type(default) == "boolean" then
    if text == "true" or text == "false" then return text == "true" end
    fail("%s wants true or false, it is '%s'", flag, text)
  end
  local number = tonumber(text)
  if math.type(default) == "float" then
    return number and number + 0.0 or fail("%s wants a number, it is '%s'", flag, text)
  end
  return math.tointeger(number) or fail("%s wants a whole number, it is '%s'", flag, text)
end

local function print_help(names, defaults)
  print(("usage: luatrain %s [options]"):format(script()))
  for _, name in ipairs(names) do
    local value = defaults[name]
    local kind = type(value) == "boolean" and "" or type(value) == "string" and "TEXT" or "N"
    print(("  %-24s (%s)"):format(flag_of(name) .. " " .. kind, tostring(value)))
  end
end

local function unknown(text, names)
  local flags = {}
  for i, name in ipairs(names) do flags[i] = flag_of(name) end
  fail("unknown option '%s'%s", text, check.hint(text, flags, " (--help lists them)"))
end

-- The values of the flags declared by defaults, from the command line.
return function(defaults)
  if type(defaults) ~= "table" then
    core.fail("EINVAL", "lt.args wants a table of defaults: lt.args{epochs = 3}")
  end
  local names, values = sorted(defaults), {}
  for name, value in pairs(defaults) do values[name] = value end
  local given = arg or {}
  local i = 1
  while given[i] do
    local flag, text = given[i]:match "^(%-%-[^=]*)=(.*)$"
    flag = flag or given[i]
    if flag == "--help" then
      print_help(names, defaults)
      os.exit(0, true)
    end
    local name = flag:match "^%-%-(.+)$"
    name = name and name:gsub("-", "_")
    local default = defaults[name or ""]
    if default == nil then unknown(flag, names) end
    if not text and type(default) == "boolean" then
      text = "true"
    elseif not text then
      i = i + 1
      text = given[i] or fail("%s wants a value", flag)
    end
    values[name] = convert(flag, text, default)
    i = i + 1
  end
  return values
end
