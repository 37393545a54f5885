-- models.lua - lt.models: the constructors of all nets in models/, by name:
-- lt.models.resnet50{classes = 1000}. Those files are ordinary user code that is embedded in the
-- library. They require luatrain themselves, so they are loaded on first use.

local check = require "luatrain.check"
local PREFIX = "luatrain.models."

local models = {}

local function read_all()
  local constructors = {}
  for name in pairs(package.preload) do
    if name:sub(1, #PREFIX) == PREFIX then
      for arch, constructor in pairs(require(name)) do constructors[arch] = constructor end
    end
  end
  for arch, constructor in pairs(constructors) do rawset(models, arch, constructor) end
  return check.strict(models, "models")      -- replaces the lazy metatable
end

return setmetatable(models, {
  __index = function(_, arch) return read_all()[arch] end,
  __pairs = function() return pairs(read_all()) end,
})
