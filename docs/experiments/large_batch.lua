-- large_batch.lua - trains ResNet-20 on CIFAR-10 with large batches, with SGD or LARS, and with or
-- without warm-up. The learning rate for batches of 128 is scaled in proportion to the batch size,
-- or used unchanged with --unscaled.
--
--   luatrain large_batch.lua --data cifar10:DIR --batch 1024
--   luatrain large_batch.lua --data cifar10:DIR --batch 1024 --unscaled --warmup 0
--   luatrain large_batch.lua --data cifar10:DIR --batch 4096 --optim lars --lr 0.3
local lt = require "luatrain"
local resnet = require "resnet"

local opt = lt.args{
  data = "", epochs = 30, batch = 1024, lr = 0.1, unscaled = false, weight_decay = 5e-4,
  warmup = 5.0, ramp = {"linear", "cosine", "exponential", "constant"}, optim = {"sgd", "lars"},
  help = {
    data = "cifar10:DIR",
    epochs = "passes over the training images",
    batch = "images per step",
    lr = "learning rate for batches of 128",
    unscaled = "it is the same for all batches, not in proportion",
    weight_decay = "weight decay; not applied to biases and norms",
    warmup = "epochs in which the learning rate rises from that of batches of 128",
    ramp = "how it rises",
    optim = "sgd with Nesterov momentum, or lars",
  }}

local train, test = lt.data.open(opt.data)
local net = resnet.resnet20{classes = train.classes, channels = train.channels}
local settings = {
  lr = opt.unscaled and opt.lr or lt.schedule.lr_for_batch{opt.lr, opt.batch, per = 128},
  momentum = 0.9, weight_decay = opt.weight_decay, decay_bias = false}
if opt.optim == "sgd" then settings.nesterov = true end

lt.fit{
  net = net, train = train, test = test, epochs = opt.epochs, batch = opt.batch,
  optim = lt.optim[opt.optim](net, settings),
  schedule = lt.schedule.cosine{warmup = opt.warmup, ramp = opt.ramp,
                                start = opt.unscaled and 1.0 or math.min(128 / opt.batch, 1)},
}
