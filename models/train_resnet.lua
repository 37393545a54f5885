-- train_resnet.lua - trains a residual network.
--
--   luatrain train_resnet.lua                                    ResNet-20 on Fashion-MNIST
--   luatrain train_resnet.lua --data cifar10:DIR --epochs 10
--   luatrain train_resnet.lua --data images:DIR --arch resnet50 --epochs 90 --batch 256 \
--                             --lr 0.1 --weight-decay 1e-4 --warmup 5 --label-smoothing 0.1
local lt = require "luatrain"
local resnet = require "resnet"

local opt = lt.args{
  data = "fashion-mnist", epochs = 3, batch = 128, lr = 0.2, weight_decay = 5e-4,
      label_smoothing = 0.0,
  warmup = 1.0, sync_bn = false,
  arch = {"resnet20", "resnet32", "resnet44", "resnet56",
          "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"},
  help = {
    data = "fashion-mnist[:DIR], cifar10:DIR, images:DIR or synthetic:HxWxC/CLASSES",
    arch = "20 to 56 are for small images, the others for 224 x 224",
    epochs = "passes over the training images",
    batch = "images per step",
    lr = "learning rate after the warm-up; decays to 0 along a cosine",
    weight_decay = "weight decay; not applied to biases and norms",
    label_smoothing = "fraction of each label spread over all classes",
    warmup = "epochs over which the learning rate rises from 0",
    sync_bn = "synchronize batch norm over all ranks",
  }}

local train, test = lt.data.open(opt.data, {center_crop = 0.875})
local net = resnet[opt.arch]{
  classes = train.classes, channels = train.channels, sync_bn = opt.sync_bn}

lt.fit{
  net = net, train = train, test = test, epochs = opt.epochs, batch = opt.batch,
  optim = lt.optim.sgd(net, {lr = opt.lr, momentum = 0.9, nesterov = true,
      weight_decay = opt.weight_decay,
                             decay_bias = false}),
  schedule = lt.schedule.cosine{warmup = opt.warmup},
  label_smoothing = opt.label_smoothing,
}
