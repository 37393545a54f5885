-- spikes.lua - compares loss scales in fp16: trains LeNet with a loss that is multiplied by a small
-- factor, and in every Nth batch by a large one, too. The learning rate and the limit of clipping
-- compensate for the small factor. Without the large one, and without rounding, the run does not
-- depend on it.
--
--   luatrain --amp fp16 spikes.lua --factor 32
--   luatrain --amp fp16 spikes.lua --factor 20 --spike 40 --policy dynamic
local lt = require "luatrain"
local lenet = require "lenet"

local opt = lt.args{
  data = "fashion-mnist", epochs = 2, batch = 64, lr = 0.05, factor = 0, spike = 0, every = 16,
  policy = {"adaptive", "dynamic", "static"}, scale = 65536,
  help = {
    data = "fashion-mnist[:DIR] or synthetic:HxWxC/CLASSES",
    epochs = "passes over the training images",
    batch = "images per step",
    lr = "initial learning rate for a factor of 1; decays to 0",
    factor = "the loss is multiplied by 2 to the power of minus this",
    spike = "in every Nth batch, it is also multiplied by 2 to the power of this; 0: in none",
    every = "N, for spike",
    policy = "policy of the loss scaler",
    scale = "scale with which the loss scaler begins",
  }}

local train, test = lt.data.open(opt.data)
local net = lenet.lenet{classes = train.classes, channels = train.channels, size = train.height}
local factor = 2.0 ^ -opt.factor
local sgd = lt.optim.sgd(net, {lr = opt.lr / factor, momentum = 0.9, clip = 2 * factor})

local run <close> = lt.run{
  net = net, optim = sgd, train = train, epochs = opt.epochs, batch = opt.batch,
  schedule = lt.schedule.linear{}, scaler = {policy = opt.policy, scale = opt.scale}}
for _ in run:epochs() do
  for x, y in run:batches() do
    local is_spike = opt.spike > 0 and run.steps % opt.every == opt.every - 1
    run:step(function()
      local loss = lt.cross_entropy(net(x), y) * (is_spike and factor * 2.0 ^ opt.spike or factor)
      loss:backward()
      sgd:step()
      return loss
    end)
  end
  run:report(run:evaluate(test))
end
