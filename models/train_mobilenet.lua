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
    arch = "net to train",
    epochs = "passes over the training images",
    batch = "images per step",
    lr = "learning rate after the warm-up; decays to 0 along a cosine",
    width = "multiplier of the paper's channel counts",
    weight_decay = "weight decay; not applied to biases and norms",
    label_smoothing = "fraction of each label spread over all classes",
    warmup = "epochs over which the learning rate rises from 0",
    sync_bn = "synchronize batch norm over all ranks",
  }}

local train, test = lt.data.open(opt.data, {center_crop = 0.875})
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
