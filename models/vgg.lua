-- vgg.lua - Simonyan and Zisserman 2014, Very Deep Convolutional Networks for Large-Scale Image
-- Recognition, arXiv:1409.1556. Nets named _bn have a batch norm after each convolution.
--
--   vgg16{}                                               224 x 224, 138,357,544 parameters
--   vgg11_bn{classes = 10, size = 32, hidden = 512}       small images, 9,756,426 parameters
--
-- `size` is the height and width of the images, which sets the inputs of the first linear layer.
-- `hidden` is the width of the two hidden linear layers, which contain most of the parameters. With
-- sync_bn = true, batch norm is synchronized over all ranks.
local lt = require "luatrain"
local nn = lt.nn

-- Table 1: the output channels of each stage, and its number of 3x3 convolutions.
local channels_of_stage = {64, 128, 256, 512, 512}
local nets = {
  vgg11 = {1, 1, 2, 2, 2},
  vgg13 = {2, 2, 2, 2, 2},
  vgg16 = {2, 2, 3, 3, 3},
  vgg19 = {2, 2, 4, 4, 4},
}

local function stage(c_in, c, count, norm)
  local layers = {}
  for i = 1, count do
    layers["conv" .. i] = nn.conv2d{c_in, c, 3, pad = 1, init = "he"}
    layers["bn" .. i] = norm and norm{c} or nil
    layers["relu" .. i] = nn.relu()
    c_in = c
  end
  return layers
end

local function make(counts, norm, o)
  local net, c_in, side = {}, o.channels, o.size
  for i, c in ipairs(channels_of_stage) do
    local layers = stage(c_in, c, counts[i], norm)
    if side > 1 then                              -- small images shrink to one pixel early
      layers.pool = nn.max_pool2d{2}
      side = side // 2
    end
    net["stage" .. i] = nn.sequential(layers)
    c_in = c
  end
  net.flatten = nn.flatten()
  net.classifier = nn.sequential{
    fc1 = nn.linear{side * side * c_in, o.hidden, init = 0.01},
    relu1 = nn.relu(), dropout1 = nn.dropout{o.dropout},
    fc2 = nn.linear{o.hidden, o.hidden, init = 0.01},
    relu2 = nn.relu(), dropout2 = nn.dropout{o.dropout},
    fc3 = nn.linear{o.hidden, o.classes, init = 0.01},
  }
  return nn.sequential(net)
end

local constructors = {}

for name, counts in pairs(nets) do
  for suffix, has_norm in pairs{[""] = false, _bn = true} do
    local spec = lt.check(name .. suffix .. "{; classes:count=1000, channels:count=3, "
                          .. "size:count=224, hidden:count=4096, dropout=0.5"
                          .. (has_norm and ", sync_bn=false}" or "}"))
    constructors[name .. suffix] = function(options)
      local o = spec(options)
      return make(counts, has_norm and (o.sync_bn and nn.sync_batch_norm or nn.batch_norm), o)
    end
  end
end

return constructors
