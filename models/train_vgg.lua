-- train_vgg.lua - trains a VGG net.
--
--   luatrain train_vgg.lua                                       VGG-11 on Fashion-MNIST
--   luatrain train_vgg.lua --data cifar10:DIR --arch vgg16_bn --epochs 30
--   luatrain train_vgg.lua --data images:DIR --arch vgg16 --epochs 74 --batch 256 --lr 0.01
local lt = require "luatrain"
local vgg = require "vgg"

local opt = lt.args{
  data = "fashion-mnist", epochs = 3, batch = 128, lr = 0.05, weight_decay = 5e-4, warmup = 1.0,
  sync_bn = false,
  arch = {"vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn", "vgg11", "vgg13", "vgg16", "vgg19"},
  help = {
    data = "fashion-mnist[:DIR], cifar10:DIR, images:DIR or synthetic:HxWxC/CLASSES",
    arch = "net to train; _bn: with batch norm",
    epochs = "passes over the training images",
    batch = "images per step",
    lr = "learning rate after the warm-up; decays to 0 along a cosine",
    weight_decay = "weight decay; not applied to biases and norms",
    warmup = "epochs over which the learning rate rises from 0",
    sync_bn = "synchronize batch norm over all ranks",
  }}

local train, test = lt.data.open(opt.data, {center_crop = 0.875})
local net = vgg[opt.arch]{
  classes = train.classes, channels = train.channels, size = train.height,
  hidden = train.height < 128 and 512 or 4096, sync_bn = opt.sync_bn or nil}

lt.fit{
  net = net, train = train, test = test, epochs = opt.epochs, batch = opt.batch,
  optim = lt.optim.sgd(net, {lr = opt.lr, momentum = 0.9, weight_decay = opt.weight_decay,
      decay_bias = false}),
  schedule = lt.schedule.cosine{warmup = opt.warmup},
}
