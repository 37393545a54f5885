-- lenet.lua - a small convolutional net for grey images of 28 x 28, after LeCun et al. 1998.
-- 421,642 parameters for 10 classes.
local lt = require "luatrain"
local nn = lt.nn

-- make{classes = 10}
return function(options)
  return nn.sequential{
    nn.conv2d{1, 32, 3, pad = 1}, nn.relu(), nn.max_pool2d{2},    -- (n, 14, 14, 32)
    nn.conv2d{32, 64, 3, pad = 1}, nn.relu(), nn.max_pool2d{2},   -- (n, 7, 7, 64)
    nn.flatten(),
    nn.linear{7 * 7 * 64, 128}, nn.relu(),
    nn.linear{128, options and options.classes or 10},
  }
end
