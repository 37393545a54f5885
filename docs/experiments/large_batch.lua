-- large_batch.lua - trains a net on CIFAR-10 or Fashion-MNIST with large batches: with SGD or LARS,
-- with or without warm-up, with several schedules, and with what recipes add. The learning rate for
-- batches of 128 is scaled in proportion to the batch size, or used unchanged with --unscaled.
--
--   luatrain large_batch.lua --data cifar10:DIR --batch 1024
--   luatrain large_batch.lua --data cifar10:DIR --batch 1024 --unscaled --warmup 0
--   luatrain large_batch.lua --data cifar10:DIR --batch 4096 --optim lars --lr 0.3
--   luatrain large_batch.lua --data fashion-mnist --arch lenet --batch 128 --schedule cosine_linear
local lt = require "luatrain"

local opt = lt.args{
  data = "", arch = {"resnet20", "lenet"}, epochs = 30, batch = 1024, lr = 0.1, unscaled = false,
  weight_decay = 5e-4, warmup = 5.0, ramp = {"linear", "cosine", "exponential", "constant"},
  schedule = {"cosine", "cosine_linear", "linear", "step"}, optim = {"sgd", "lars"},
  label_smoothing = 0.0, mixup = 0.0, zero_init = false, accumulate = 1,
  help = {
    data = "cifar10:DIR or fashion-mnist",
    arch = "net to train",
    epochs = "passes over the training images",
    batch = "images per step",
    lr = "learning rate for batches of 128",
    unscaled = "it is the same for all batches, not in proportion",
    weight_decay = "weight decay; not applied to biases and norms",
    warmup = "epochs in which the learning rate rises from that of batches of 128",
    ramp = "how it rises",
    schedule = "how it falls; step: to a tenth after a half and after three quarters of the epochs",
    optim = "sgd with Nesterov momentum, or lars",
    label_smoothing = "fraction of each label spread over all classes",
    mixup = "alpha of mixup",
    zero_init = "the last norm of each block of a ResNet begins with a scale of 0",
    accumulate = "micro-batches of a step",
  }}

local train, test = lt.data.open(opt.data)
local options = {classes = train.classes, channels = train.channels}
if opt.arch == "lenet" then options.size = train.height else options.zero_init = opt.zero_init end
local net = lt.models[opt.arch](options)
local settings = {
  lr = opt.unscaled and opt.lr or lt.schedule.lr_for_batch{opt.lr, opt.batch, per = 128},
  momentum = 0.9, weight_decay = opt.weight_decay, decay_bias = false}
if opt.optim == "sgd" then settings.nesterov = true end
local rise = {warmup = opt.warmup, ramp = opt.ramp,
              start = opt.unscaled and 1.0 or math.min(128 / opt.batch, 1)}
if opt.schedule == "step" then rise.at = {opt.epochs / 2, 3 * opt.epochs / 4} end

lt.fit{
  net = net, train = train, test = test, epochs = opt.epochs, batch = opt.batch,
  optim = lt.optim[opt.optim](net, settings), schedule = lt.schedule[opt.schedule](rise),
  label_smoothing = opt.label_smoothing, mixup = opt.mixup, accumulate = opt.accumulate,
}
