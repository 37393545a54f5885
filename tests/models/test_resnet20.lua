-- test_resnet20.lua - ResNet-20 for small images (He et al., 2016); shortcuts are 1x1 convolutions
-- where the shape changes, step by step beside PyTorch's.
local lt = require "luatrain"
local nn = lt.nn
local follow = require "trajectory"

local function conv(c_in, c, kernel, stride)
  return nn.conv2d{c_in, c, kernel, stride = stride, pad = kernel // 2, bias = false}
end

local function block(c_in, c, stride)
  local parts = {conv1 = conv(c_in, c, 3, stride), bn1 = nn.batch_norm{c},
                 conv2 = conv(c, c, 3, 1), bn2 = nn.batch_norm{c}}
  if stride > 1 then parts.conv3, parts.bn3 = conv(c_in, c, 1, stride), nn.batch_norm{c} end
  return nn.module(parts, function(self, x)
    local y = self.bn2(self.conv2(lt.relu(self.bn1(self.conv1(x)))))
    return lt.relu(y + (self.conv3 and self.bn3(self.conv3(x)) or x))
  end)
end

local function resnet20()
  local blocks, c_in = {}, 16
  for stage, c in ipairs{16, 32, 64} do
    for i = 1, 3 do
      blocks[#blocks + 1] = block(c_in, c, stage > 1 and i == 1 and 2 or 1)
      c_in = c
    end
  end
  local parts = {conv1 = conv(3, 16, 3, 1), bn1 = nn.batch_norm{16}, blocks = nn.sequential(blocks),
                 fc = nn.linear{64, 10}}
  return nn.module(parts, function(self, x)
    x = self.blocks(lt.relu(self.bn1(self.conv1(x))))
    return self.fc(lt.global_avg_pool2d(x))
  end)
end

follow("resnet20", resnet20, 0.0001)
