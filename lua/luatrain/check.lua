-- check.lua - strict arguments: one line of text says what a maker takes, and is the check and
-- the help of it.
--
--   local spec = check "nn.conv2d{in, out, kernel:pair; stride:pair=1, bias=true}"
--   local given, text = spec{3, 64, 3, stride = 2}
--   given    {["in"] = 3, out = 64, kernel = 3, stride = 2, bias = true}
--   text     "conv2d{3, 64, 3, stride = 2}"
--
-- What stands before the semicolon may be given by position, and all by name. `name?` may be left
-- out, `name=default` too. The kind follows a colon, or is that of the default, or is a count.

local core = ...

local check = {}

local function fail(...) core.fail("EINVAL", string.format(...)) end

local function shown(value)
  if type(value) == "string" then return "'" .. value .. "'" end
  if core.is_tensor(value) then return "a tensor" end
  if type(value) == "table" or type(value) == "function" then return "a " .. type(value) end
  return tostring(value)
end

local function whole(value, least)
  local integer = type(value) == "number" and math.tointeger(value)
  return integer and integer >= least and integer or nil
end

-- Each kind: what it wants, and a function that gives the value back, or nil for a wrong one.
local kinds = {
  count = {"a whole number from 1 up", function(value) return whole(value, 1) end},
  integer = {"a whole number from 0 up", function(value) return whole(value, 0) end},
  pair = {"a whole number, or two (height, width)", function(value)
    if type(value) ~= "table" then return whole(value, 0) end
    local height, width = whole(value[1], 0), whole(value[2], 0)
    return height and width and #value == 2 and {height, width} or nil
  end},
  number = {"a number", function(value) return type(value) == "number" and value or nil end},
  boolean = {"true or false", function(value)
    if type(value) == "boolean" then return value end
  end},
  string = {"a string", function(value) return type(value) == "string" and value or nil end},
  layer = {"a module or a function", function(value)
    local module = type(value) == "table" and rawget(value, core.module_key)
    return (module or type(value) == "function") and value or nil
  end},
}

-- "stride:pair=1" as a table.
local function read_item(text)
  local name, optional, kind, default = text:match "^%s*([%w_]+)(%??):?(%a*)=?(%S*)%s*$"
  local item = {name = name, optional = optional == "?", kind = kind}
  if default == "true" or default == "false" then
    item.default, item.kind = default == "true", "boolean"
  elseif tonumber(default) then
    item.default = tonumber(default)
    if kind == "" then item.kind = math.type(item.default) == "float" and "number" or "integer" end
  elseif default ~= "" and kind == "" then
    item.default, item.kind = default, "string"
  elseif default ~= "" then
    item.same_as = default
  elseif kind == "" then
    item.kind = "count"
  end
  return item
end

local Spec = {}
Spec.__index = Spec

-- The value for one name, checked.
function Spec:value(name, value)
  local item = self.items[name]
  if not item then
    local hint = check.hint(tostring(name), self.names, ": " .. self.usage)
    fail("%s: unknown key %s%s", self.name, shown(name), hint)
  end
  local wanted, read = table.unpack(kinds[item.kind])
  local good = read(value)
  if good == nil then
    fail("%s: '%s' wants %s, it is %s", self.name, item.name, wanted, shown(value))
  end
  return good
end

-- "conv2d{3, 64, 3, stride = 2}": what differs from the defaults.
local function describe(self, values)
  local list = {}
  for i, item in ipairs(self.items) do
    local value = values[item.name]
    local default = item.default
    if item.same_as then default = values[item.same_as] end
    if value ~= nil and value ~= default and item.kind ~= "layer" then
      local pair = type(value) == "table"
      local text = pair and ("{%d, %d}"):format(value[1], value[2]) or tostring(value)
      local by_position = i <= self.n_positions and #list == i - 1
      list[#list + 1] = by_position and text or item.name .. " = " .. text
    end
  end
  local short = self.name:match "[%w_]+$"
  return #list > 0 and short .. "{" .. table.concat(list, ", ") .. "}" or short
end

function Spec:__call(given)
  if given == nil then given = {} end
  if type(given) ~= "table" or getmetatable(given) then
    fail("%s wants one table: %s, it is %s", self.name, self.usage, shown(given))
  end
  local values = {}
  for key, value in pairs(given) do
    if type(key) == "number" and key > self.n_positions then
      fail("%s takes %d values by position: %s", self.name, self.n_positions, self.usage)
    end
    local name = type(key) == "number" and self.items[key] and self.items[key].name or key
    if values[name] ~= nil then fail("%s: '%s' is given twice", self.name, name) end
    values[name] = self:value(name, value)
  end
  for _, item in ipairs(self.items) do
    if values[item.name] == nil then values[item.name] = item.default end
    if values[item.name] == nil and item.same_as then values[item.name] = values[item.same_as] end
    if values[item.name] == nil and not item.optional then
      fail("%s: '%s' must be given: %s", self.name, item.name, self.usage)
    end
  end
  return values, describe(self, values)
end

-- Makes the check of a text like the one above.
local function new(_, text)
  local self = {name = text:match "^[%w_.]+", items = {}, names = {}}
  self.usage = text:gsub(":%a+", ""):gsub("{; ", "{")
  local positions, rest = text:match "{(.-);(.*)}"
  if not positions then positions, rest = text:match "{(.*)}", "" end
  for _, part in ipairs{positions, rest} do
    for piece in part:gmatch "[^,%s][^,]*" do
      local item = read_item(piece)
      self.items[#self.items + 1] = item
      self.items[item.name] = item
      self.names[#self.names + 1] = item.name
    end
    self.n_positions = self.n_positions or #self.items
  end
  return setmetatable(self, Spec)
end

-- " (did you mean 'near'?)", or otherwise.
function check.hint(word, names, otherwise)
  local near = core.nearest(word, names)
  return near and (" (did you mean '%s'?)"):format(near) or otherwise
end

-- Reading a name that a table of functions does not have is an error.
function check.strict(functions, name)
  return setmetatable(functions, {__index = function(_, key)
    local names = {}
    for known in pairs(functions) do names[#names + 1] = tostring(known) end
    fail("%s has no '%s'%s", name, tostring(key), check.hint(tostring(key), names, ""))
  end})
end

return setmetatable(check, {__call = new})
