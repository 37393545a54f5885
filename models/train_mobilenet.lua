-- train_mobilenet.lua - trains a MobileNet.
--
--   luatrain train_mobilenet.lua                                 half the width, on Fashion-MNIST
--   luatrain train_mobilenet.lua --data cifar10:DIR --width 1 --epochs 30
--   luatrain train_mobilenet.lua --data images:DIR --width 1 --epochs 90 --batch 256 \
--     --weight-decay 4e-5
local lt = require "luatrain"
local mobilenet = require "mobilenet_v1"

local opt = lt.args{
  data = "fashion-mnist", arch = {"mobilenet_v1"}, epochs = 5, batch = 128, lr = 0.1, width = 0.5,
  weight_decay = 1e-4, label_smoothing = 0.0, warmup = 1.0, sync_bn = false,
  help = {
    data = "fashion-mnist[:DIR], cifar10:DIR, images:DIR or synthetic:HxWxC/CLASSES",
    arch = "what to train",
    epochs = "passes over the training images",
    batch = "images a step",
    lr = "learning rate after the warm-up; it falls to 0 along a cosine",
    width = "times the channels of the paper",
    weight_decay = "weight decay; biases and norms have none",
    label_smoothing = "of the labels: this share is spread over all classes",
    warmup = "epochs in which the learning rate rises from 0",
    sync_bn = "batch norm is that of all ranks",
  }}

local train, test = lt.data.open(opt.data)
local net = mobilenet[opt.arch]{
  classes = train.classes, channels = train.channels, width = opt.width, sync_bn = opt.sync_bn,
  stride = train.height < 128 and 1 or 2}        -- the first convolution keeps small images' size

lt.fit{
  net = net, train = train, test = test, epochs = opt.epochs, batch = opt.batch,
  optim = lt.optim.sgd(net, {lr = opt.lr, momentum = 0.9, nesterov = true,
      weight_decay = opt.weight_decay,
                             decay_bias = false}),
  schedule = lt.schedule.cosine{warmup = opt.warmup},
  label_smoothing = opt.label_smoothing,
}
