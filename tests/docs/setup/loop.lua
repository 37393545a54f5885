-- loop.lua - a run that has just given a batch.
lt = require "luatrain"
net = lt.models.lenet{}
sgd = lt.optim.sgd(net, {lr = 0.05})
local train = lt.data.open "synthetic:28x28x1/10/64"
run = lt.run{net = net, optim = sgd, train = train, epochs = 1, batch = 32}
run:epochs()()
x, y = run:batches()()
total = 0
