-- step.lua - a net, an optimizer and a batch, for blocks that take one step.
lt = require "luatrain"
net = lt.models.lenet{}
sgd = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9})
x, y = lt.randn{8, 28, 28, 1}, lt.tensor({0, 1, 2, 3, 4, 5, 6, 7}, {dtype = "i64"})
