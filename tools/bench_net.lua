-- bench_net.lua - runs training steps of one net on random images as fast as possible, and prints
-- the results as a line of JSON. tools/bench and gpu_bench run it, alternating with bench_torch.py.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"

local opt = lt.args{
  arch = {"lenet", "resnet20", "mobilenet_v1", "resnet50", "vgg16"}, amp = {"off", "bf16", "fp16"},
  batch = 64, warm_up = 2, steps = 3, seconds = 3.0, side = 0, micro = 1, apart = false,
  limits = "",
  help = {
    arch = "the net", amp = "the precision", batch = "images per step",
    warm_up = "steps that are not measured", steps = "minimum number of measured steps",
    seconds = "minimum duration of these", side = "side of images; 0: 28, or 224 for large nets",
    micro = "micro-batches of a step; in a pipeline, give --parallel micro=1",
    apart = "first time --steps steps at a time without timing their ops, then as many with it",
    limits = "limits of the machine, as JSON; only: measure these and nothing else; none: do not "
             .. "measure them, and print only the speed, and without --apart the memory",
  }}

if opt.limits == "only" then
  io.write(json.text(bench.limits()), "\n")
  return
end
local limits = opt.limits ~= "" and opt.limits ~= "none" and json.read(opt.limits)

local small = opt.arch == "lenet" or opt.arch == "resnet20"
local side, channels, classes = 224, 3, 1000
if small then side, channels, classes = 28, 1, 10 end
if opt.side > 0 then side = opt.side end

local options = {channels = channels, classes = classes}
if opt.arch == "lenet" or opt.arch == "vgg16" then options.size = side end
local net = lt.models[opt.arch](options)
local sgd = lt.optim.sgd(net, {lr = 0.01, momentum = 0.9, weight_decay = 1e-4})
local _ <close> = opt.amp == "fp16" and lt.amp.scaler{} or nil
local x, labels = lt.randn{opt.batch, side, side, channels}, {}
for i = 1, opt.batch do labels[i] = i % classes end
local y = lt.tensor(labels, {dtype = "i64"})

local function forward(x_i, y_i) return lt.cross_entropy(net(x_i), y_i) end

local function learn(x_i, y_i, share)
  local loss = lt.autocast(opt.amp, forward, x_i, y_i)
  if share < 1 then loss = loss * share end
  loss:backward()
end

local function step()
  if opt.micro == 1 then
    learn(x, y, 1)
  else
    for x_i, y_i, share in lt.micro_batches(opt.micro, x, y) do lt.step(learn, x_i, y_i, share) end
  end
  sgd:step()
end

local meter = bench.meter(opt.apart and 0 or opt.warm_up)
local middle, best
if opt.apart then
  for _ = 1, opt.warm_up do lt.step(step) end
  middle, best = bench.rates(opt.batch, opt.steps, opt.seconds, step)
  if opt.limits == "none" then
    print(json.text{images_per_s = middle, best_images_per_s = best})
    return
  end
end
repeat
  local seconds = meter:step(opt.batch, step)
until #meter.rates >= opt.steps and (opt.apart or seconds >= opt.seconds)

if opt.limits == "none" then
  middle, best = bench.spread(meter.rates)
  print(json.text{images_per_s = middle, best_images_per_s = best, peak_rss_bytes = meter.peak_rss})
  return
end
local result = bench.result(meter, limits or bench.limits())
result.parameters = net:count()
if opt.apart then
  result.of_limit = result.of_limit * result.step_s * middle / opt.batch
  result.images_per_s, result.best_images_per_s = middle, best
end
print(json.text(result))
