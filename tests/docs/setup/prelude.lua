-- prelude.lua - runs before every Lua block: replaces Fashion-MNIST with images in folder DIR.
local lt = require "luatrain"

local open = lt.data.open
rawset(lt.data, "open", function(name, options)
  return open(name == "fashion-mnist" and "fashion-mnist:DIR" or name, options)
end)
