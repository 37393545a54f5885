-- lenet.lua - a small convolutional net, after LeCun et al. 1998, for images of size x size.
-- lenet{} takes grey images of 28 x 28 and has 421,642 parameters.
local lt = require "luatrain"
local nn = lt.nn

local spec = lt.check "lenet{; classes:count=10, channels:count=1, size:count=28}"

local function lenet(options)
  local o = spec(options)
  local side = o.size // 4                                      -- after two 2 x 2 poolings
  return nn.sequential{
    conv1 = nn.conv2d{o.channels, 32, 3, pad = 1}, relu1 = nn.relu(), pool1 = nn.max_pool2d{2},
    conv2 = nn.conv2d{32, 64, 3, pad = 1}, relu2 = nn.relu(), pool2 = nn.max_pool2d{2},
    flatten = nn.flatten(),
    fc1 = nn.linear{side * side * 64, 128}, relu3 = nn.relu(),
    fc2 = nn.linear{128, o.classes},
  }
end

return {lenet = lenet}
