-- mobilenet_v1.lua - Howard et al. 2017, MobileNets: Efficient Convolutional Neural Networks for
-- Mobile Vision Applications, arXiv:1704.04861.
--
--   mobilenet_v1{}                                       224 x 224, 4,231,976 parameters
--   mobilenet_v1{width = 0.5}                            half the channels, 1,331,592 parameters
--   mobilenet_v1{classes = 10, channels = 1, stride = 1} small grey images: the first convolution
--                                                        keeps their size
--   mobilenet_v1{sync_bn = true}                         batch norm synchronized over all ranks
local lt = require "luatrain"
local nn = lt.nn

-- Table 1: {output channels, stride} of each depthwise separable convolution. The paper prints 2
-- for the last stride, but its shapes require 1.
local layers = {
  {  64, 1},
  { 128, 2}, { 128, 1},
  { 256, 2}, { 256, 1},
  { 512, 2}, { 512, 1}, { 512, 1}, { 512, 1}, { 512, 1}, { 512, 1},
  {1024, 2}, {1024, 1},
}

-- A depthwise separable convolution: a 3x3 filter per channel, then a 1x1 convolution that mixes
-- the channels. norm is the constructor of the batch norms.
local function separable(c_in, c, stride, norm)
  return nn.sequential{
    depthwise = nn.conv2d{c_in, c_in, 3, stride = stride, pad = 1, groups = c_in, bias = false,
                          init = "he"},
    bn1 = norm{c_in}, relu1 = nn.relu(),
    pointwise = nn.conv2d{c_in, c, 1, bias = false, init = "he"},
    bn2 = norm{c}, relu2 = nn.relu(),
  }
end

local spec = lt.check("mobilenet_v1{; classes:count=1000, channels:count=3, width:amount=1.0, "
                      .. "stride:count=2, sync_bn=false}")

local function mobilenet_v1(options)
  local o = spec(options)
  local function scaled(c) return math.max(8, math.floor(o.width * c)) end
  local norm = o.sync_bn and nn.sync_batch_norm or nn.batch_norm
  local c_in, blocks = scaled(32), {}
  local net = {
    conv = nn.conv2d{o.channels, c_in, 3, stride = o.stride, pad = 1, bias = false, init = "he"},
    bn = norm{c_in}, relu = nn.relu(),
  }
  for i, layer in ipairs(layers) do
    local c, stride = scaled(layer[1]), layer[2]
    blocks[i] = separable(c_in, c, stride, norm)
    c_in = c
  end
  net.blocks = nn.sequential(blocks)
  net.mean = nn.global_avg_pool2d()
  net.fc = nn.linear{c_in, o.classes}
  return nn.sequential(net)
end

return {mobilenet_v1 = mobilenet_v1}
