-- recipes.lua - published ImageNet training runs, as settings of lt.fit.
--
--   local recipes = require "recipes"
--   recipes.fit("resnet50_fast", {train = train, test = test, epochs = 10, batch = 256})
--
-- A recipe is written for its own `batch` and `epochs` and for images of 224 x 224. With another
-- batch, the learning rate changes in proportion. With a different number of epochs, the schedule
-- is stretched. With other images, a recipe that changes the image size during training scales its
-- sizes in proportion. Each size gets a whole number of epochs and its own part of the schedule; in
-- a short run a size may get no epoch. The published results are of the centre of the test images:
-- open them with center_crop = 0.875, as train_recipe.lua does.
local lt = require "luatrain"

local recipes = {}

-- NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5. Reported top1: 78.3
-- to 78.6 % after 250 epochs with mixup; without mixup (train_recipe.lua --mixup 0), 76.9 to 77.2 %
-- after 90 epochs and 75.8 % after 50.
recipes.resnet50_78 = {
  arch = "resnet50", epochs = 250, batch = 2048, lr = 2.048, momentum = 0.875,
      weight_decay = 2.0 ^ -15,
  label_smoothing = 0.1, mixup = 0.2, schedule = lt.schedule.cosine{warmup = 8},
}

-- GluonCV's mobilenet1.0: 73.28 % top1. The settings are from its log,
-- logs/classification/imagenet/mobilenet1.0.log in github.com/dmlc/web-data. GluonCV also used
-- random colour jitter, which this recipe omits.
recipes.mobilenet_73 = {
  arch = "mobilenet_v1", epochs = 200, batch = 1024, lr = 0.4, momentum = 0.9, nesterov = true,
  weight_decay = 1e-4, label_smoothing = 0.1, mixup = 0.2,
      schedule = lt.schedule.cosine{warmup = 5},
}

-- Returns a piecewise linear schedule. Each item of list is {first epoch, last epoch, factor at the
-- first, factor at the last}.
local function lines(list)
  return function(epoch)
    for i, line in ipairs(list) do
      local from, to, first, last = table.unpack(line)
      if epoch < to or i == #list then
        return first + (last - first) * math.min((epoch - from) / (to - from), 1)
      end
    end
  end
end

-- fast.ai and DIUx, the settings for one machine with 8 V100 GPUs in train.py of
-- github.com/cybertronai/imagenet18_old: 93.0 % top5 in 109 minutes. Lambda reproduced it with
-- 75.92 % top1. In its last phase the original tests on rectangular images; here they are square.
-- Larger images need more memory, so their batch is smaller, and the learning rate in proportion.
local of_224, of_288 = 224 / 512, 128 / 512
recipes.resnet50_fast = {
  arch = "resnet50", options = {zero_init = true}, epochs = 28, batch = 8 * 512, lr = 1.0,
  momentum = 0.9, weight_decay = 1e-4,
  schedule = lines{
    {0, 7, 1, 2}, {7, 13, 2, 0.25},
    {13, 22, of_224, 0.1 * of_224}, {22, 25, 0.1 * of_224, 0.01 * of_224},
    {25, 28, 0.01 * of_288, 0.001 * of_288}},
  sizes = {
    {epochs = 13, size = 128, area = 0.08},
    {epochs = 12, size = 224, area = 0.087, batch = 8 * 224},
    {epochs = 3, size = 288, area = 0.5, batch = 8 * 128}},
}

-- ==== Running a recipe ===========================================================================

local function round(x) return math.max(1, math.floor(x + 0.5)) end

-- Spreads `epochs` over the phases of a recipe, a whole number for each. Returns a list of {phase,
-- from, first, last}: the phase begins at epoch `from` of the recipe and covers the epochs from
-- first to last, excluding last. Stages that get no epoch are left out.
local function parts_of(recipe, epochs)
  local list, before, done = {}, 0, 0
  for _, phase in ipairs(recipe.sizes or {{epochs = recipe.epochs}}) do
    local last = math.floor((before + phase.epochs) * epochs / recipe.epochs + 0.5)
    if last > done then
      list[#list + 1] = {phase = phase, from = before, first = done, last = last}
    end
    before, done = before + phase.epochs, last
  end
  return list
end

-- Returns the `sizes` of lt.fit for parts, a result of parts_of(), scaled to the batch and to
-- images whose side is `side`.
local function sizes_of(recipe, parts, batch, side)
  local list = {}
  for i, part in ipairs(parts) do
    local phase = part.phase
    list[i] = {epochs = part.last - part.first, size = round(phase.size * side / 224),
               area = phase.area,
               batch = round((phase.batch or recipe.batch) * batch / recipe.batch)}
  end
  return list
end

-- Returns a schedule that stretches each phase of the recipe over its part. A schedule stretched as
-- a whole would use the rates of one phase with the batch of another.
local function schedule_of(recipe, parts)
  return function(epoch)
    local i = 1
    while epoch >= parts[i].last and parts[i + 1] do i = i + 1 end
    local part = parts[i]
    local share = (epoch - part.first) / (part.last - part.first)
    return recipe.schedule(part.from + share * part.phase.epochs, recipe.epochs)
  end
end

local spec = lt.check("recipes.fit(name, {; train:set, test:set, epochs?, batch?, accumulate=1, "
                      .. "mixup?:amount, target?:share})")

-- Trains the net of the recipe `name` and returns the result of lt.fit. epochs, batch and mixup
-- default to the recipe's values.
function recipes.fit(name, given)
  local recipe, o = recipes[name], spec(given)
  if type(recipe) ~= "table" then
    error(("recipes.fit: unknown recipe '%s'"):format(name), 2)
  end
  local epochs, batch = o.epochs or recipe.epochs, o.batch or recipe.batch
  local options = {classes = o.train.classes, channels = o.train.channels}
  for key, value in pairs(recipe.options or {}) do options[key] = value end
  local net = lt.models[recipe.arch](options)
  local parts = parts_of(recipe, epochs)
  return lt.fit{
    net = net, train = o.train, test = o.test, epochs = epochs, batch = batch,
    optim = lt.optim.sgd(net, {
      lr = lt.schedule.lr_for_batch{recipe.lr, batch, per = recipe.batch},
      momentum = recipe.momentum, nesterov = recipe.nesterov, weight_decay = recipe.weight_decay,
      decay_bias = false}),
    schedule = schedule_of(recipe, parts),
    sizes = recipe.sizes and sizes_of(recipe, parts, batch, o.train.height),
    label_smoothing = recipe.label_smoothing, mixup = o.mixup or recipe.mixup,
        accumulate = o.accumulate,
    target = o.target,
  }
end

return lt.check.strict(recipes, "recipes")
