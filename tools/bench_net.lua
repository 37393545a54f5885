-- bench_net.lua - takes steps of one net on random images, as fast as they go, and prints what was
-- measured as one line of JSON. tools/bench runs it, in turn with bench_torch.py.
local lt = require "luatrain"
local bench = require "luatrain.bench"
local json = require "luatrain.json"

local opt = lt.args{
  arch = {"lenet", "resnet20", "mobilenet_v1", "resnet50", "vgg16"}, amp = {"off", "bf16"},
  batch = 64, warm_up = 2, steps = 3, seconds = 3.0,
  help = {
    arch = "the net", amp = "the precision", batch = "images a step",
    warm_up = "steps that do not count", steps = "those that do, at least",
    seconds = "what these take, at least",
  }}

local small = opt.arch == "lenet" or opt.arch == "resnet20"
local side, channels, classes = 224, 3, 1000
if small then side, channels, classes = 28, 1, 10 end

local net = lt.models[opt.arch]{channels = channels, classes = classes}
local sgd = lt.optim.sgd(net, {lr = 0.01, momentum = 0.9, decay = 1e-4})
local x, labels = lt.randn{opt.batch, side, side, channels}, {}
for i = 1, opt.batch do labels[i] = i % classes end
local y = lt.tensor(labels, {dtype = "i64"})

local function forward() return lt.cross_entropy(net(x), y) end

local function step()
  lt.autocast(opt.amp, forward):backward()
  sgd:step()
end

local meter = bench.meter(opt.warm_up)
repeat
  local seconds = meter:step(opt.batch, step)
until #meter.rates >= opt.steps and seconds >= opt.seconds

local result = bench.result(meter, bench.limits())
result.parameters = net:count()
print(json.text(result))
