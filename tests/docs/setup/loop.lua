-- loop.lua - a run and its first batch.
local lt = require "luatrain"
local net = lt.models.lenet{}
local sgd = lt.optim.sgd(net, {lr = 0.05})
local train, test = lt.data.open "synthetic:28x28x1/10/64"
local run = lt.run{net = net, optim = sgd, train = train, epochs = 1, batch = 32}
run:epochs()()
local x, y = run:batches()()
return {lt = lt, net = net, sgd = sgd, run = run, x = x, y = y, test = test, total = 0}
