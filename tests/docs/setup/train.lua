-- train.lua - the script that shell blocks run when their page has no train.lua of its own.
local lt = require "luatrain"
local nn = lt.nn

local train, test = lt.data.open "synthetic:12x12x3/10/256"
local net = nn.sequential{
  nn.conv2d{3, 8, 3, stride = 2}, nn.batch_norm{8}, lt.relu, nn.flatten(), nn.linear{200, 10}}
lt.fit{net = net, optim = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9}), train = train,
       test = test, epochs = 2, batch = 64}
