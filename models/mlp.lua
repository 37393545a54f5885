-- mlp.lua - a multilayer perceptron with two hidden layers, the smallest example of a net.
-- mlp{} has 269,322 parameters.
local lt = require "luatrain"
local nn = lt.nn

local spec = lt.check "mlp{; classes:count=10, channels:count=1, size:count=28, hidden:count=256}"

local function mlp(options)
  local o = spec(options)
  return nn.sequential{
    flatten = nn.flatten(),
    fc1 = nn.linear{o.size * o.size * o.channels, o.hidden}, relu1 = nn.relu(),
    fc2 = nn.linear{o.hidden, o.hidden}, relu2 = nn.relu(),
    fc3 = nn.linear{o.hidden, o.classes},
  }
end

return {mlp = mlp}
