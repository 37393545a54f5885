-- scalers.lua - trains ResNet-20 or a MobileNet-v1 of half the width on CIFAR-10 for 10 epochs, in
-- the precision of --amp, to compare accuracies. fp16 uses one of the loss scalers.
--
--   luatrain --amp bf16 scalers.lua --data cifar10:DIR --arch resnet20
--   luatrain --amp fp16 scalers.lua --data cifar10:DIR --arch mobilenet --policy dynamic
local lt = require "luatrain"
local resnet = require "resnet"
local mobilenet = require "mobilenet_v1"

local opt = lt.args{
  data = "", arch = {"resnet20", "mobilenet"}, epochs = 10, batch = 128,
  policy = {"adaptive", "dynamic", "static"}, scale = 65536,
  help = {
    data = "cifar10:DIR",
    arch = "net to train",
    epochs = "passes over the training images",
    batch = "images per step",
    policy = "of the loss scaler",
    scale = "that it begins with",
  }}

local train, test = lt.data.open(opt.data)
local net, weight_decay
if opt.arch == "resnet20" then
  net, weight_decay = resnet.resnet20{classes = train.classes, channels = train.channels}, 5e-4
else
  net, weight_decay = mobilenet.mobilenet_v1{classes = train.classes, channels = train.channels,
                                      width = 0.5, stride = 1}, 1e-4
end

lt.fit{
  net = net, train = train, test = test, epochs = opt.epochs, batch = opt.batch,
  optim = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9, nesterov = true, weight_decay = weight_decay,
                             decay_bias = false}),
  schedule = lt.schedule.cosine{warmup = 1},
  scaler = {policy = opt.policy, scale = opt.scale},
}
