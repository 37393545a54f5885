-- check.lua - strict arguments: one line of text declares the arguments of a constructor. It serves
-- as their check and as their help.
--
--   local spec = check "nn.conv2d{in, out, kernel:pair; stride:pair=1, bias=true}"
--   local given, text = spec{3, 64, 3, stride = 2}
--   given    {["in"] = 3, out = 64, kernel = 3, stride = 2, bias = true}
--   text     "conv2d{3, 64, 3, stride = 2}"
--
-- Arguments before the semicolon may be given by position; all may be given by name. `name?` and
-- `name=default` are optional. The kind follows a colon; without a colon it is the kind of the
-- default, or count if there is no default.

local core = ...
local arity = require "luatrain.arity"

local check = {precisions = {"off", "bf16", "fp16", "auto"}}

local function fail(...) core.fail("EINVAL", string.format(...)) end

local function class_of(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.__name
end

-- A value as messages show it.
local function shown(value)
  if type(value) == "string" then return "'" .. value .. "'" end
  if core.is_tensor(value) then return "a tensor" end
  if class_of(value) then return "a " .. class_of(value) end
  if type(value) == "table" or type(value) == "function" then return "a " .. type(value) end
  return tostring(value)
end

check.shown = shown

-- "{code = 3, message = 'hello'}" for an error that is a table: at most 16 of its fields, sorted.
core.set_table_text(function(err)
  local list, is_shown = {}, {string = true, number = true, boolean = true}
  for key, value in next, err do
    if type(key) ~= "boolean" and is_shown[type(key)] and is_shown[type(value)] then
      list[#list + 1] = ("%s = %s"):format(key, shown(value))
    end
  end
  table.sort(list)
  return "{" .. table.concat(list, ", ", 1, math.min(#list, 16)) .. "}"
end)

-- Describes a value that a function returned: "a tensor f32 {2, 3}", "a nil".
function check.described(value)
  return "a " .. (core.is_tensor(value) and "tensor " .. core.describe(value) or type(value))
end

-- Converts a value, a number or a tensor of one element, to a number. In errors, who names the
-- function that returned it, and what says what it is.
function check.number(value, who, what)
  if core.is_tensor(value) and value:count() == 1 then return value:item() end
  if type(value) == "number" then return value end
  fail("%s must return %s, one number, but returned %s", who, what, check.described(value))
end

local function whole(value, least)
  local integer = type(value) == "number" and math.tointeger(value)
  return integer and integer >= least and integer or nil
end

local function amount(value)
  return type(value) == "number" and value >= 0 and value < math.huge and value or nil
end

local function is_module(value)
  return type(value) == "table" and rawget(value, core.module_key) ~= nil
end

-- Whether a value is a table with no keys other than 1 to #value.
local function is_list(value)
  if type(value) ~= "table" then return false end
  for key in pairs(value) do
    if math.type(key) ~= "integer" or key < 1 or key > #value then return false end
  end
  return true
end

local function list_of(value, kind)
  if not is_list(value) then return nil end
  for _, item in ipairs(value) do
    if type(item) ~= kind then return nil end
  end
  return table.move(value, 1, #value, 1, {})
end

local function numbers(value)
  return type(value) == "number" and value or list_of(value, "number")
end

local function one_of(...)
  local words, known = {...}, {}
  for i, word in ipairs(words) do words[i], known[word] = "'" .. word .. "'", true end
  local last = table.remove(words)
  return {table.concat(words, ", ") .. " or " .. last, function(value)
    return known[value] and value or nil
  end}
end

-- Each kind: its description in errors, and a function that returns the checked value, or nil if
-- the value is wrong.
local kinds = {
  count = {"a positive integer", function(value) return whole(value, 1) end},
  integer = {"a non-negative integer", function(value) return whole(value, 0) end},
  pair = {"a non-negative integer, or two (height, width)", function(value)
    if type(value) ~= "table" then return whole(value, 0) end
    local height, width = whole(value[1], 0), whole(value[2], 0)
    return height and width and #value == 2 and is_list(value) and {height, width} or nil
  end},
  number = {"a number", function(value) return type(value) == "number" and value or nil end},
  amount = {"a non-negative number", amount},
  share = {"a number from 0 to 1", function(value)
    return amount(value) and value <= 1 and value or nil
  end},
  epochs = {"a list of increasing numbers, like {30, 60}", function(value)
    if not is_list(value) or #value == 0 then return nil end
    for i, item in ipairs(value) do
      if not amount(item) or item <= (value[i - 1] or 0) then return nil end
    end
    return table.move(value, 1, #value, 1, {})
  end},
  init = {"'uniform', 'he' or a standard deviation", function(value)
    return (value == "uniform" or value == "he" or amount(value)) and value or nil
  end},
  ramp = one_of("linear", "cosine", "exponential", "constant"),
  amp = one_of(table.unpack(check.precisions)),
  policy = one_of(table.unpack(core.policies)),
  act = one_of("none", "relu", "relu6"),
  boolean = {"true or false", function(value)
    if type(value) == "boolean" then return value end
  end},
  string = {"a string", function(value) return type(value) == "string" and value or nil end},
  path = {"a path", function(value)
    return type(value) == "string" and value ~= "" and value or nil
  end},
  layer = {"a module or a function", function(value)
    return (is_module(value) or type(value) == "function") and value or nil
  end},
  net = {"a net", function(value) return is_module(value) and value or nil end},
  optims = {"an optimizer of lt.optim or a list of them", function(value)
    local list = class_of(value) == "luatrain.Optim" and {value} or list_of(value, "table")
    for _, item in ipairs(list or {}) do
      if class_of(item) ~= "luatrain.Optim" then return nil end
    end
    return list and #list > 0 and list or nil
  end},
  set = {"a set of lt.data", function(value)
    return class_of(value) == "luatrain.Set" and value or nil
  end},
  tensor = {"a tensor", function(value) return core.is_tensor(value) and value or nil end},
  numbers = {"a number or a list of numbers", numbers},
  list = {"a list of tables", function(value) return list_of(value, "table") end},
  metrics = {"a list such as {lt.metrics.top1}", function(value)
    return list_of(value, "table")
  end},
  names = {"a list of strings", function(value) return list_of(value, "string") end},
  call = {"a function", function(value) return type(value) == "function" and value or nil end},
  options = {"a table of options, or false", function(value)
    if value == false or type(value) == "table" and not getmetatable(value) then return value end
  end},
}
local unsaid = {layer = true, init = true, net = true, optims = true, set = true, call = true,
                list = true, metrics = true, options = true,
                tensor = true}                    -- kinds that describe() leaves out

-- Parses an item such as "stride:pair=1". The default may be the name of an earlier item.
local function read_item(text, items)
  local name, optional, kind, default = text:match "^%s*([%w_]+)(%??):?(%a*)=?(%S*)%s*$"
  local item = {name = name, optional = optional == "?", kind = kind}
  if default == "true" or default == "false" then
    item.default, item.kind = default == "true", "boolean"
  elseif tonumber(default) then
    item.default = tonumber(default)
    if kind == "" then item.kind = math.type(item.default) == "float" and "number" or "integer" end
  elseif items[default] then
    item.same_as = default
  elseif default ~= "" then
    item.default, item.kind = default, kind ~= "" and kind or "string"
  elseif kind == "" then
    item.kind = "count"
  end
  return item
end

-- What is wrong with a value that read() refuses: "is 5", or "item 2 is 'x'" if read() accepts the
-- list without its items.
local function wrong_in(value, read)
  if is_list(value) and read{} then
    for i, item in ipairs(value) do
      if not read{item} then return ("item %d is %s"):format(i, shown(item)) end
    end
  end
  return "is " .. shown(value)
end

local Spec = {}
Spec.__index = Spec

-- Checks a value for the argument `name` and returns it. EINVAL for an unknown name.
function Spec:value(name, value)
  local item = self.items[name]
  if not item then
    local hint = check.hint(tostring(name), self.names, ": " .. self.usage)
    fail("%s: unknown key %s%s", self.name, shown(name), hint)
  end
  local wanted, read = table.unpack(kinds[item.kind])
  local good = read(value)
  if good == nil then
    fail("%s: '%s' must be %s, but %s", self.name, item.name, wanted, wrong_in(value, read))
  end
  return good
end

-- The call as text, with the arguments that differ from the defaults: "conv2d{3, 64, 3, stride =
-- 2}".
local function describe(self, values)
  local list = {}
  for i, item in ipairs(self.items) do
    local value = values[item.name]
    local default = item.default
    if item.same_as then default = values[item.same_as] end
    if value ~= nil and value ~= default and not unsaid[item.kind] then
      local several = type(value) == "table"
      local text = several and "{" .. table.concat(value, ", ") .. "}" or tostring(value)
      local by_position = i <= self.n_positions and #list == i - 1
      list[#list + 1] = by_position and text or item.name .. " = " .. text
    end
  end
  local short = self.name:match "[%w_]+$"
  return #list > 0 and short .. "{" .. table.concat(list, ", ") .. "}" or short
end

local function read_given(self, given)
  if given == nil then given = {} end
  if type(given) ~= "table" or getmetatable(given) then
    fail("%s requires one table: %s, but got %s", self.name, self.usage, shown(given))
  end
  local values = {}
  for key, value in pairs(given) do
    if type(key) == "number" and key > self.n_positions then
      fail("%s accepts %d values by position: %s", self.name, self.n_positions, self.usage)
    end
    local name = type(key) == "number" and self.items[key] and self.items[key].name or key
    if values[name] ~= nil then fail("%s: '%s' is given twice", self.name, name) end
    values[name] = self:value(name, value)
  end
  for _, item in ipairs(self.items) do
    if values[item.name] == nil then values[item.name] = item.default end
    if values[item.name] == nil and item.same_as then values[item.name] = values[item.same_as] end
    if values[item.name] == nil and not item.optional then
      fail("%s: '%s' is missing: %s", self.name, item.name, self.usage)
    end
  end
  return values, describe(self, values)
end

Spec.__call = arity.of_method(read_given, "the check of a constructor", {"given"})

-- lt.check(text): makes the check for a declaration like that at the top of this file.
local function new(_, text)
  if type(text) ~= "string" or not text:match "^[%w_.:]+.*{.*}" then
    fail("lt.check requires a text like 'net{in, out; bias=true}', but got %s", shown(text))
  end
  local name, rest = text:match "^([%w_.:]+)(.*)$"
  local self = {name = name, items = {}, names = {}}
  self.usage = name .. rest:gsub(":%a+", ""):gsub("{; ", "{")
  local positions, named = rest:match "{(.-);(.*)}"
  if not positions then positions, named = rest:match "{(.*)}", "" end
  for _, part in ipairs{positions, named} do
    for piece in part:gmatch "[^,%s][^,]*" do
      local item = read_item(piece, self.items)
      if not item.name or not kinds[item.kind] then
        fail("lt.check: %s: cannot read '%s'; write 'name:kind=default', with a known kind",
             self.name, piece)
      end
      self.items[#self.items + 1] = item
      self.items[item.name] = item
      self.names[#self.names + 1] = item.name
    end
    self.n_positions = self.n_positions or #self.items
  end
  return setmetatable(self, Spec)
end

-- " (did you mean 'near'?)" if one of names is close to word, else `otherwise`.
function check.hint(word, names, otherwise) return core.hint(word, names, otherwise) end

-- Makes a table of functions strict and returns it: reading an unknown name is an error, and so is
-- a call with too many arguments. name is for errors; prefix: see arity.lua.
function check.strict(functions, name, prefix)
  local old = getmetatable(functions)
  arity.functions(functions, prefix or name .. ".")
  return setmetatable(functions, {__newindex = old and old.__newindex, __index = function(_, key)
    local names = {}
    for known in pairs(functions) do names[#names + 1] = tostring(known) end
    table.sort(names)
    local use = core.foreign(tostring(key))
    fail("%s has no '%s'%s", name, tostring(key),
         use and (" (use %s)"):format(use) or check.hint(tostring(key), names, ""))
  end})
end

return setmetatable(check, {__call = arity.of_method(new, "lt.check", {"text"})})
