-- async.lua - one run of the experiment with asynchronous training: trains LeNet on Fashion-MNIST
-- or ResNet-20 on CIFAR-10. The last 5,000 training images are held out: their accuracy after each
-- epoch serves to choose learning rates. With --test, the test set is read once, after the last
-- epoch. async_runs.lua starts all runs of the experiment.
--
--   luatrain --seed 1 --parallel async=ddc --simulate workers=16,delay=lognormal:0.2 \
--       async.lua --test
local lt = require "luatrain"
local lenet = require "lenet"
local resnet = require "resnet"

local HELD_OUT = 5000

local opt = lt.args{
  data = "fashion-mnist", epochs = 4, batch = 64, lr = 0.02, momentum = 0.9, clip = 0.0,
  test = false,
  help = {
    data = "fashion-mnist or cifar10:DIR",
    epochs = "passes over the training images",
    batch = "images per step of a worker",
    lr = "learning rate; a tenth of it in the last 30 % of the training",
    momentum = "of SGD",
    clip = "largest norm of the gradients; 0: they are not clipped",
    test = "report the accuracy on the test set after the last epoch",
  }}

local all, test = lt.data.open(opt.data)

local function part(first, last)
  return lt.data.set{images = lt.slice(all.images, 1, first, last),
                     labels = lt.slice(all.labels, 1, first, last),
                     names = all.names, mean = all.mean, std = all.std}
end

local train, held_out = part(1, #all - HELD_OUT), part(#all - HELD_OUT + 1, #all)
local is_cifar = opt.data:find "^cifar10" ~= nil
local options = {classes = all.classes, channels = all.channels}
if not is_cifar then options.size = all.height end
local net = is_cifar and resnet.resnet20(options) or lenet.lenet(options)
local sgd = lt.optim.sgd(net, {
  lr = opt.lr, momentum = opt.momentum, clip = opt.clip, decay_bias = false,
  weight_decay = is_cifar and 1e-4 or 0})

local run <close> = lt.run{
  net = net, optim = sgd, train = train, epochs = opt.epochs, batch = opt.batch,
  augment = all.augment,
  schedule = function(epoch, epochs) return epoch < 0.7 * epochs and 1.0 or 0.1 end}
for epoch in run:epochs() do
  for x, y in run:batches() do
    run:step(function()
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      sgd:step()
      return loss
    end)
  end
  local numbers = run:evaluate(held_out, {batch = 500})
  if opt.test and epoch == opt.epochs then
    numbers.test_top1 = run:evaluate(test, {batch = 500}).top1
  end
  run:report(numbers)
end
