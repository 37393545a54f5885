-- train_lenet.lua - trains LeNet or a multilayer perceptron with an explicit training loop. lt.fit,
-- which the other examples use, contains the same loop.
--
--   luatrain train_lenet.lua                      LeNet on Fashion-MNIST
--   luatrain train_lenet.lua --arch mlp --lr 0.02
local lt = require "luatrain"

local opt = lt.args{
  data = "fashion-mnist", arch = {"lenet", "mlp"}, epochs = 3, batch = 64, lr = 0.05,
  help = {
    data = "fashion-mnist[:DIR], cifar10:DIR, images:DIR or synthetic:HxWxC/CLASSES",
    arch = "net to train",
    epochs = "passes over the training images",
    batch = "images per step",
    lr = "initial learning rate; decays to 0",
  }}

local train, test = lt.data.open(opt.data)
local make = require(opt.arch)[opt.arch]
local net = make{classes = train.classes, channels = train.channels, size = train.height}
local sgd = lt.optim.sgd(net, {lr = opt.lr, momentum = 0.9, weight_decay = 1e-4})
print(net)

local run <close> = lt.run{
  net = net, optim = sgd, train = train, epochs = opt.epochs, batch = opt.batch,
  schedule = lt.schedule.linear{}}

for _ in run:epochs() do
  for x, y in run:batches() do                   -- shuffled; x (n, h, w, c), y (n)
    run:step(function()                          -- frees its temporaries at the end
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      sgd:step()
      return loss
    end)
  end
  run:report(run:evaluate(test))
end
