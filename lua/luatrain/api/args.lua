-- args.lua - lt.args: the command-line flags of a script, declared by their defaults.
--
--   local opt = lt.args{
--     data = "fashion-mnist", arch = {"lenet", "mlp"}, epochs = 3, lr = 0.05, verbose = false,
--     help = {epochs = "passes over the training images"}}
--
-- The type of the default is the type of the flag: string, integer, float or boolean (a switch). A
-- list of strings is a choice, whose default is the first. A number may be negative only if its
-- default is. An integer must be at least 1 if its default is: 0 epochs is an error.
--
-- --name value and --name=value set a flag; --switch alone means true. A flag has - where its name
-- has _. --help prints all flags with their text in `help`. Errors are usage errors (EUSAGE).

local core = ...
local check = require "luatrain.check"
local command_line = require "luatrain.command_line"

local FIRST = {"data", "arch", "epochs", "batch", "lr"}     -- first in --help; the rest by name
local WIDTH = 80                                            -- columns of --help

local function script() return arg and arg[0] and arg[0]:match "[^/]*$" or "script" end
local function fail(...) core.fail("EUSAGE", script() .. ": " .. string.format(...)) end
local function refuse(...) core.fail("EINVAL", "lt.args" .. string.format(...)) end

local function flag_of(name) return "--" .. name:gsub("_", "-") end

-- ==== Flags: {name, flag, kind, default, choices, least, help} ===================================

local function is_choice(value)
  for _, item in ipairs(value) do
    if type(item) ~= "string" then return false end
  end
  return #value > 0
end

local function read_flag(name, value)
  local f = {name = name, default = value, kind = math.type(value) or type(value)}
  if f.kind == "table" and is_choice(value) then
    f.kind, f.choices, f.default = "choice", value, value[1]
  elseif f.kind == "integer" and value >= 0 then
    f.least = value > 0 and 1 or 0
  elseif f.kind == "float" and value >= 0 then
    f.least = 0
  end
  local known = {choice = true, integer = true, float = true, string = true, boolean = true}
  if type(name) ~= "string" or not known[f.kind] then
    refuse(": the default of %s must be a string, a number, a boolean or a list of strings", name)
  end
  f.flag = flag_of(name)
  return f
end

local function read_help(help, by_name, names)
  if type(help) ~= "table" then
    refuse(": help must map names of flags to sentences: help = {epochs = \"how often\"}")
  end
  for name, sentence in pairs(help) do
    if not by_name[name] then
      local hint = check.hint(tostring(name), names, "")
      refuse(": help has '%s', which is not a flag%s", name, hint)
    end
    if type(sentence) ~= "string" then refuse(": the help of %s must be a string", name) end
    by_name[name].help = sentence
  end
end

-- Returns the flags by name, and their names in the order of --help.
local function read_flags(defaults)
  if type(defaults) ~= "table" then refuse " requires a table of defaults: lt.args{epochs = 3}" end
  local by_name, names, rank = {}, {}, {}
  for i, name in ipairs(FIRST) do rank[name] = i end
  for name, value in pairs(defaults) do
    if name ~= "help" then
      by_name[name] = read_flag(name, value)
      names[#names + 1] = name
    end
  end
  table.sort(names, function(a, b)
    local i, k = rank[a] or #FIRST + 1, rank[b] or #FIRST + 1
    return i < k or i == k and a < b
  end)
  if defaults.help ~= nil then read_help(defaults.help, by_name, names) end
  return by_name, names
end

-- ==== Values =====================================================================================

local function to_choice(f, text)
  for _, choice in ipairs(f.choices) do
    if text == choice then return text end
  end
  fail("%s must be one of %s, but is '%s'%s", f.flag, table.concat(f.choices, ", "), text,
       check.hint(text, f.choices, ""))
end

local function to_number(f, text)
  local whole = f.kind == "integer"
  local number = tonumber(text)
  if number and whole then number = math.tointeger(number) end
  if number and number >= (f.least or -math.huge) and math.abs(number) < math.huge then
    return whole and number or number + 0.0
  end
  local sign = f.least and (f.least > 0 and "positive " or "non-negative ") or ""
  local article = whole and sign == "" and "an" or "a"
  fail("%s must be %s %s%s, but is '%s'", f.flag, article, sign, whole and "integer" or "number",
       text)
end

local function convert(f, text)
  if f.kind == "string" then return text end
  if f.kind == "choice" then return to_choice(f, text) end
  if f.kind ~= "boolean" then return to_number(f, text) end
  if text == "true" or text == "false" then return text == "true" end
  fail("%s must be true or false, but is '%s'", f.flag, text)
end

-- ==== Help =======================================================================================

-- Breaks text into lines of at most `width` characters.
local function wrap(text, width)
  local lines = {""}
  for word in text:gmatch "%S+" do
    local line = lines[#lines]
    if line == "" then
      lines[#lines] = word
    elseif #line + 1 + #word <= width then
      lines[#lines] = line .. " " .. word
    else
      lines[#lines + 1] = word
    end
  end
  return lines
end

local VALUES = {choice = " NAME", integer = " N", float = " X", string = " TEXT", boolean = ""}

-- The left and the right column of a flag in --help.
local function help_of(f)
  local left, right = f.flag .. VALUES[f.kind], f.help or ""
  if f.default == true then left = left .. "=false" end
  if f.kind ~= "boolean" and f.default ~= "" then
    right = ("%s (%s)"):format(right, tostring(f.default))
  end
  if f.choices then right = right .. ": " .. table.concat(f.choices, ", ") end
  return left, right
end

local function print_help(by_name, names)
  local rows, width = {}, #"--help"
  for i, name in ipairs(names) do
    local left, right = help_of(by_name[name])
    rows[i] = {left, right}
    width = math.max(width, #left)
  end
  rows[#rows + 1] = {"--help", "print this help"}
  print(("usage: luatrain [luatrain options] %s [options]\n"):format(script()))
  for _, row in ipairs(rows) do
    for i, line in ipairs(wrap(row[2], WIDTH - width - 4)) do
      local left = ("  %-" .. width .. "s  "):format(i == 1 and row[1] or "")
      print(((left .. line):gsub("%s+$", "")))
    end
  end
  print "\nluatrain's own options go before the script: luatrain --help lists them."
end

-- ==== The command line ===========================================================================

local function unknown(text, names)
  local flags = {}
  if command_line.options[text] ~= nil then
    fail("%s is an option of luatrain itself and goes before the script: luatrain %s ... %s",
         text, text, script())
  end
  for i, name in ipairs(names) do flags[i] = flag_of(name) end
  local otherwise = " (--help lists them; luatrain's own go before the script)"
  fail("unknown option '%s'%s", text, check.hint(text, flags, otherwise))
end

-- lt.args(defaults): parses the command line and returns the values of all flags by name.
return core.in_c_locale(function(defaults)
  local by_name, names = read_flags(defaults)
  local given, values, i = arg or {}, {}, 1
  for name, f in pairs(by_name) do values[name] = f.default end
  while given[i] do
    local flag, text = given[i]:match "^(%-%-[^=]*)=(.*)$"
    flag = flag or given[i]
    if flag == "--help" then
      print_help(by_name, names)
      os.exit(0, true)
    end
    local name = flag:match "^%-%-(.+)$"
    local f = by_name[name and name:gsub("-", "_") or ""]
    if not f then unknown(flag, names) end
    if not text and f.kind == "boolean" then
      text = "true"
    elseif not text then
      i = i + 1
      text = given[i]
      if not text or text:match "^%-%-" then fail("%s requires a value", flag) end
    end
    values[f.name] = convert(f, text)
    i = i + 1
  end
  return values
end)
