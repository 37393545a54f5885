-- gpu_check_train.lua - a short training of a small net, for tools/gpu_check, which reads the
-- losses, the skipped steps and the digest of the weights from the run's folder.
--
-- Differences in the last bits grow with each step, faster in a deeper net and at a higher learning
-- rate. The nets here are shallow, with four blocks instead of a whole MobileNet, and the rates
-- low, so that the differences are still small after 20 steps.
local lt = require "luatrain"
local nn = lt.nn

local opt = lt.args{
  arch = {"lenet", "resnet20", "depthwise"}, steps = 20, batch = 16,
  help = {arch = "the net", steps = "number of steps", batch = "images per step"}}

local function separable(c, out, stride)
  return nn.sequential{
    nn.conv2d{c, c, 3, stride = stride, pad = 1, groups = c, bias = false},
    nn.batch_norm{c}, lt.relu, nn.conv2d{c, out, 1, bias = false}, nn.batch_norm{out}, lt.relu}
end

local nets = {
  lenet = {image = "12x12x1", lr = 0.01, make = function(o)
    return lt.models.lenet{size = 12, classes = o.classes, channels = o.channels}
  end},
  resnet20 = {image = "16x16x3", lr = 0.0003, make = lt.models.resnet20},
  depthwise = {image = "16x16x3", lr = 0.001, make = function(o)
    return nn.sequential{
      nn.conv2d{o.channels, 16, 3, pad = 1, bias = false}, nn.batch_norm{16}, lt.relu,
      separable(16, 32, 2), separable(32, 32, 1), separable(32, 64, 2), separable(64, 64, 1),
      lt.global_avg_pool2d, nn.linear{64, o.classes}}
  end},
}

local net_of = nets[opt.arch]
local train, test = lt.data.open(("synthetic:%s/4/%d"):format(net_of.image, opt.batch * opt.steps))
local net = net_of.make{classes = train.classes, channels = train.channels}
lt.fit{
  net = net, train = train, test = test, epochs = 1, batch = opt.batch,
  optim = lt.optim.sgd(net, {lr = net_of.lr, momentum = 0.9}),
}
