-- annotations.lua - prints annotations/luatrain.lua, which describes the library to editors with
-- lua-language-server. The build runs it in the root of the repository.
--
-- Names, options, defaults and comments are read from the library: the signatures of ops and other
-- C functions, the specs of options (see check.lua), the names of parameters, and the comment above
-- each function. annotation_types.lua has the types that the library does not declare.

local lt = require "luatrain"
local sorted = require "luatrain.keys"
local types = require "annotation_types"

local function fail(...)
  error("tools/annotation_types.lua: " .. string.format(...), 0)
end

-- ==== Reading the library ========================================================================

local function upvalues(fn)
  local i = 0
  return function()
    i = i + 1
    return debug.getupvalue(fn, i)
  end
end

local Spec = debug.getmetatable(lt.check "_{}")
local specs, metatables = {}, {Spec = Spec}             -- by name

-- Finds the specs and the metatables of classes in everything that is reachable from a value.
local function crawl(value, seen)
  local kind = type(value)
  if kind ~= "table" and kind ~= "function" or seen[value] then return end
  seen[value] = true
  if kind == "function" then
    for name, held in upvalues(value) do
      if name ~= "_ENV" then crawl(held, seen) end
    end
    return
  end
  local meta, class = debug.getmetatable(value), rawget(value, "__name")
  if meta == Spec then specs[value.name] = value end
  if type(class) == "string" then metatables[class:match "%w+$"] = value end
  crawl(meta, seen)
  for key, held in next, value do
    crawl(key, seen)
    crawl(held, seen)
  end
end

for _ in pairs(lt.models) do end                        -- loads them
crawl(lt, {})
local set = {images = lt.zeros{1, 1, 1, 1}, labels = lt.zeros({1}, {dtype = "i64"})}
metatables.Tensor = debug.getmetatable(set.images)
metatables.Batches = debug.getmetatable(lt.data.set(set):open_batches{batch = 1})

local function is_op(name) return (pcall(lt.help, name)) end

-- The methods of a class by name. If __index is a function, their table is one of its upvalues,
-- which is named like the class in Lua and has no name in C.
local function methods_of(class)
  local index = metatables[class].__index
  if type(index) == "table" then return index end
  for name, value in upvalues(index) do
    if type(value) == "table" and (name == class or name == "") then return value end
  end
end

-- Returns the function inside the wrappers of arity.lua and core.in_c_locale(), and the names of
-- the parameters that a wrapper of arity.lua knows, or nil.
local function unwrap(fn)
  local inner, names
  for name, value in upvalues(fn) do
    if type(value) == "function" and (name == "fn" or name == "") then inner = value end
    if name == "names" then names = value end
  end
  local info = debug.getinfo(fn, "S")
  local wraps = names or info.what == "C" or info.short_src == "luatrain/arity.lua"
  if not inner or not wraps then return fn end
  return (unwrap(inner)), names
end

for name, core in upvalues((unwrap(lt.save))) do
  if name == "core" then
    for path, text in pairs(core.signatures) do
      local takes, rest = text:match "(%b())(.*)"
      types.signatures[path] = takes:sub(2, -2) .. rest
    end
  end
end

-- The names of a function's parameters as text; nil for a C function that does not name them.
local function parameters_of(fn, is_method)
  local inner, names = unwrap(fn)
  local info = debug.getinfo(inner, "uS")
  if not names and info.what == "C" then return nil end
  if not names then
    names = {}
    for i = is_method and 2 or 1, info.nparams do names[#names + 1] = debug.getlocal(inner, i) end
    if info.isvararg then names[#names + 1] = "..." end
  end
  return table.concat(names, ", ")
end

local files = {}
local function lines_of(path)
  if not files[path] then
    files[path] = {}
    for text in io.lines(path) do table.insert(files[path], text) end
  end
  return files[path]
end

-- The comment above a Lua function as a list of lines.
local function comment_of(fn)
  local list, info = {}, debug.getinfo(unwrap(fn), "S")
  local file = info.source:match "luatrain/(models/.*)"
  local lines = lines_of(file or info.source:gsub("^.-luatrain/", "lua/luatrain/"))
  for i = info.linedefined - 1, 1, -1 do
    local text = lines[i]:match "^%s*%-%- ?(.*)"
    if not text then break end
    table.insert(list, 1, text)
  end
  return list
end

-- ==== Writing ====================================================================================

local wanted = {}                    -- specs whose options are referred to: "class", then "done"

local function say(...) io.write(string.format(...), "\n") end

-- Writes the short types of annotation_types.lua in full. own: the spec that a bare @ stands for.
local function full(text, own)
  return (text:gsub("%f[%w_.@]%u%w*", "luatrain.%0"):gsub("@([%w_.]*)", function(name)
    name = name == "" and own or name
    if not specs[name] then fail("there is no spec '%s', as in '%s'", name, text) end
    wanted[name] = wanted[name] or "class"
    return "luatrain." .. name:gsub("^lt%.", "") .. ".Options"
  end))
end

local function say_field(text)
  local name, optional, kind = text:match "^(.-)(%??): (.*)$"
  say("---@field %s%s %s", name, optional, full(kind))
end

local descriptions                          -- of kinds, in check.lua
for name, value in upvalues(Spec.value) do
  if name == "kinds" then descriptions = value end
end

local function must_be_given(item)
  return item.default == nil and not item.same_as and not item.optional
end

-- Returns the type of an item of a spec, and its description.
local function item_type(spec, item)
  local text, words = descriptions[item.kind][1], {}
  local default = spec.usage:match("%f[%w_]" .. item.name .. "=([^,}%s]+)")
  local kind = types.named[item.name] or types.kinds[item.kind]
  if not kind then
    for word in text:gmatch "'%w+'" do words[#words + 1] = word end
    kind, text = table.concat(words, "|"), ""
  end
  if kind == "" then fail("kind '%s' has no type", item.kind) end
  if default then text = (text .. "; default: " .. default):gsub("^; ", "") end
  return full(kind), text
end

-- The class of the options of a spec. A list of more than three values by position would be hard to
-- read, so editors expect names there.
local function say_spec(spec)
  say("\n---@class %s", full("@" .. spec.name))
  local by_position = spec.n_positions <= 3 and spec.n_positions or 0
  for i, item in ipairs(spec.items) do
    local kind, text = item_type(spec, item)
    if i <= by_position then say("---@field [%d]? %s %s", i, kind, item.name) end
    local optional = (i <= by_position or not must_be_given(item)) and "?" or ""
    local name = item.name == "in" and '["in"]' or item.name
    say("---@field %s%s %s %s", name, optional, kind, text)
  end
end

local function may_be_omitted(spec)
  for _, item in ipairs(spec and spec.items or {{}}) do
    if must_be_given(item) then return false end
  end
  return true
end

-- Splits "names -> results -- note" in three.
local function read_signature(text)
  local takes, note = text:match "^(.-)%s*%-%- (.*)$"
  takes = takes or text
  local before, gives = takes:match "^(.-)%s*%-> (.*)$"
  return before or takes, gives or "", note
end

-- Writes a function or a method. path is "lt.nn.conv2d" or "Tensor:fill".
local used = {}
local function say_function(path, fn)
  local group, name = path:match "^(.*)[.:](.-)$"
  local key = types.signatures[path] and path or group
  if not types.signatures[key] then fail("%s has no signature", path) end
  used[key] = true
  local own = specs[path] and path or specs[path:sub(4)] and path:sub(4) or name
  local takes, gives, note = read_signature(types.signatures[key])
  local lines, names = note and {note} or comment_of(fn), {}
  if (takes .. ";"):find "@;" then
    table.insert(lines, 1, "")
    table.insert(lines, 1, "`" .. specs[own].usage .. "`")
  end
  for param, optional, kind in takes:gmatch "([%w_.]+)(%??): ([^;]+)" do
    local of = kind:match "^@(.*)$"
    if of and may_be_omitted(specs[of == "" and own or of]) then optional = "?" end
    names[#names + 1] = param
    lines[#lines + 1] = ("@param %s%s %s"):format(param, optional, full(kind, own))
  end
  local wrote, known = table.concat(names, ", "), parameters_of(fn, path:find ":")
  if known and known ~= wrote then fail("%s takes (%s), not (%s)", path, known, wrote) end
  for kind in gives:gmatch "[^; ][^;]*" do lines[#lines + 1] = "@return " .. full(kind, own) end
  say(#lines > 0 and "\n---%s" or "", table.concat(lines, "\n---"))
  say("function %s(%s) end", path, wrote)
end

-- The type of an option of an op, from its name and the rest of its text in the signature. earlier:
-- the options before it, by name, one of which may be the default. See autograd/schema.c.
local function option_type(name, rest, earlier)
  local default = rest:match "^=(.*)" or ""
  if name == "dtype" then return "luatrain.DType" end
  if default:find "|" then return "'" .. default:gsub("|", "'|'") .. "'" end
  if default == "true" or default == "false" then return "boolean" end
  local whole = rest == "" or rest == "?" or default:match "^%-?%d+$" or earlier[default]
  return whole and "integer|integer[]" or "number"
end

-- Writes an op as a function and as a method. Options follow the inputs, by position or in one
-- table, which may also take the place of an optional input. A number may stand for a tensor.
local function say_op(name)
  local signature, doc = lt.help(name):match "^(.-)\n(.*)$"
  local inputs, rest = signature:match "%((.-)%f[;)];?%s*(.*)%)"
  local options, names, lines = {}, {}, {"`" .. signature .. "`", "", doc}
  local or_table = rest == "" and "" or "|luatrain." .. name .. ".Options"
  local function add(param, kind)
    names[#names + 1] = param:match "[%w_.]+"
    lines[#lines + 1] = ("@param %s %s"):format(param, kind)
  end
  if rest ~= "" then say("\n---@class %s", or_table:sub(2)) end
  for option, more in rest:gmatch "([%w_]+)([^,%s]*)" do
    local kind, default = option_type(option, more, options), more:match "^=([^|]*)"
    options[#options + 1], options[option] = option, kind
    say("---@field %s? %s %s", option, kind, default and "default: " .. default
                                             or more == "?" and "may be absent" or "required")
  end
  for input, mark in inputs:gmatch "([%w_]+)([?.]*)" do
    if mark == "..." then                   -- tensors or a list of them, then the options
      add(input, "luatrain.Tensor|luatrain.Tensor[]")
      add("...", "luatrain.Tensor|integer" .. or_table)
      options = {}
    else
      add(input .. mark, mark == "?" and "luatrain.Tensor" .. or_table or "luatrain.Tensor|number")
    end
  end
  for i, option in ipairs(options) do
    add(option .. "?", options[option] .. (i == 1 and or_table or ""))
  end
  say("\n---%s\n---@return luatrain.Tensor", table.concat(lines, "\n---"))
  say("function lt.%s(%s) end\nTensor.%s = lt.%s", name, table.concat(names, ", "), name, name)
end

-- The settings of all optimizers are fields of an optimizer.
local function say_settings()
  local seen = {}
  for _, name in ipairs(sorted(specs)) do
    for _, item in ipairs(name:find "^optim%." and specs[name].items or {}) do
      if not seen[item.name] then say_field(item.name .. ": " .. types.kinds[item.kind]) end
      seen[item.name] = true
    end
  end
end

local function say_class(name, fields)
  local meta, methods = metatables[name], methods_of(name)
  say("\n---@class luatrain.%s", name)
  for _, text in ipairs(fields) do say_field(text) end
  if name == "Optim" then say_settings() end
  for _, operator in ipairs{"add", "sub", "mul", "div", "idiv", "pow"} do
    if meta["__" .. operator] then
      say("---@operator %s(luatrain.Tensor|number): luatrain.Tensor", operator)
    end
  end
  if meta.__unm then say "---@operator unm: luatrain.Tensor" end
  if meta.__len then say "---@operator len: integer" end
  if fields.call then say("---@overload %s", full(fields.call)) end
  say("local %s = {}", name)
  for _, key in ipairs(sorted(methods)) do
    local inherited = key:find "^__" or name == "Tensor" and is_op(key)
    if type(methods[key]) == "function" and not inherited then
      say_function(name .. ":" .. key, methods[key])
    end
  end
end

-- Writes everything in a table of the library.
local function say_table(path, t)
  local meta, all = debug.getmetatable(t), {}
  say("\n---@class %s", (path:gsub("^lt", "luatrain")))
  if meta and meta.__call then
    local takes, gives = read_signature(types.signatures[path])
    used[path] = true
    say("---@overload fun(%s): %s", full(takes):gsub(";", ","), full(gives))
  end
  say("%s%s = {}", path == "lt" and "local " or "", path)
  for key, value in pairs(t) do all[key] = value end    -- models have their own pairs()
  for _, key in ipairs(sorted(all)) do
    local inner, value = path .. "." .. key, all[key]
    if path == "lt" and type(value) == "function" and is_op(key) then
      say_op(key)
    elseif type(value) == "function" then
      say_function(inner, value)
    elseif types.values[key] then
      local stub = type(value) == "table" and "{}" or '""'
      say("\n---@type %s\n%s = %s", full(types.values[key]), inner, stub)
    elseif type(value) == "table" then
      say_table(inner, value)
    else
      fail("%s has no type", inner)
    end
  end
end

-- Writes the classes of options that are referred to. They may refer to others, so it calls itself.
local function say_options()
  local n = 0
  for _, name in ipairs(sorted(wanted)) do
    if wanted[name] == "class" then
      wanted[name], n = "done", n + 1
      say_spec(specs[name])
    end
  end
  if n > 0 then say_options() end
end

say [[
---@meta luatrain
-- The public API, for lua-language-server. Generated by tools/annotations.lua; do not edit it.
]]
local _, message = pcall(lt.zeros, {}, {dtype = "?"})
say("---@alias luatrain.DType '%s'", message:match "%(known: (.*)%)":gsub(", ", "'|'"))
for _, alias in ipairs(types.aliases) do
  say("---@alias luatrain.%s %s", alias[1], full(alias[2]))
end
for _, class in ipairs(types.classes) do say_class(class.name, class) end
say_table("lt", lt)
say_options()
say "\nreturn lt"
for path in pairs(types.signatures) do
  if not used[path] then fail("%s is not in the library", path) end
end
