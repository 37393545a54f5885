-- step.lua - a net, an optimizer and a batch, for blocks that take one step. What a setup returns
-- becomes global variables of the block.
local lt = require "luatrain"
local net = lt.models.lenet{}
return {
  lt = lt, net = net, sgd = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9}),
  x = lt.randn{8, 28, 28, 1}, y = lt.tensor({0, 1, 2, 3, 4, 5, 6, 7}, {dtype = "i64"})}
