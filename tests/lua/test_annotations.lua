-- test_annotations.lua - annotations/luatrain.lua of the build, which describes the API to editors,
-- is complete.
local lt = require "luatrain"
local T = require "lt_test"

local PATH = T.program():match "^(.*)/" .. "/annotations/luatrain.lua"
local text = T.read(PATH)

local function has(line) return text:find("\n" .. line, 1, true) ~= nil end

-- Raises an error if the file lacks a name in a table of the library, or gives it another type.
local function compare(path, real, stub)
  for name, value in pairs(real) do
    local inner = path .. "." .. tostring(name)
    if type(value) ~= type(stub[name]) then
      error(("%s is a %s, but in %s a %s"):format(inner, type(value), PATH, type(stub[name])), 0)
    end
    local is_data = path == "lt.metrics" or inner == "lt.check.precisions"
    if type(value) == "table" and not is_data then compare(inner, value, stub[name]) end
  end
end

T.test("the file is Lua and has each public name", function()
  compare("lt", lt, assert(loadfile(PATH))())
end)

local function upvalue(fn, wanted)
  for i = 1, math.huge do
    local name, value = debug.getupvalue(fn, i)
    if not name or name == wanted and type(value) == "table" then return value end
  end
end

local net = lt.nn.linear{2, 2}
local set = lt.data.set{images = lt.zeros{2, 2, 2, 1}, labels = lt.zeros({2}, {dtype = "i64"})}

T.test("the file has each method and field of tensors, nets, optimizers and sets", function()
  local function index_of(value) return debug.getmetatable(value).__index end
  local tensor = upvalue(index_of(lt.zeros{1}), "")
  local optim = upvalue(index_of(lt.optim.sgd(net, {lr = 0.1})), "Optim")
  local classes = {Tensor = tensor, Module = index_of(net), Optim = optim, Set = index_of(set)}
  for class, members in pairs(classes) do
    for name, value in pairs(members) do
      local known = has(("function %s:%s("):format(class, name))
                    or has(("%s.%s = lt.%s\n"):format(class, name, name))
                    or type(value) == "number" and has("---@field " .. name .. " ")
      if not known and not name:find "^__" then error(class .. " has no " .. name, 0) end
    end
  end
  for name in pairs(set) do
    if name ~= "source" and not has("---@field " .. name .. " ") then
      error("Set has no " .. name, 0)
    end
  end
end)

T.test("each type in the file is declared in it", function()
  for line in text:gmatch "\n%-%-%-@(%l[^\n]*)" do
    local types = line:gsub("^field %S+ (%S+).*", "%1")         -- without its description
    for name in types:gmatch "luatrain%.[%w_.]+" do
      if not has("---@class " .. name .. "\n") and not has("---@alias " .. name .. " ") then
        error(("%s is not declared: %s"):format(name, line), 0)
      end
    end
  end
end)

T.finish()
