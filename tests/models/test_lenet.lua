-- test_lenet.lua - the LeNet of models/, as modules, step by step beside PyTorch's.
local lt = require "luatrain"
local nn = lt.nn
local follow = require "trajectory"

local function lenet()
  local parts = {conv1 = nn.conv2d{1, 32, 3, pad = 1}, conv2 = nn.conv2d{32, 64, 3, pad = 1},
                 fc1 = nn.linear{7 * 7 * 64, 128}, fc2 = nn.linear{128, 10}}
  return nn.module(parts, function(self, x)
    x = lt.max_pool2d(lt.relu(self.conv1(x)), 2)
    x = lt.max_pool2d(lt.relu(self.conv2(x)), 2)
    x = lt.relu(self.fc1(x:reshape({x:dim(1), -1})))
    return self.fc2(x)
  end)
end

follow("lenet", lenet, 0.005)
