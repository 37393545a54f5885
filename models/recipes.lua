-- recipes.lua - how others have trained nets on ImageNet, as settings of lt.fit.
--
--   local recipes = require "recipes"
--   recipes.fit("resnet50_fast", {train = train, test = test, epochs = 10, batch = 256})
--
-- A recipe is for batches of `batch` and for images of 224 x 224. Another batch has its learning
-- rate in proportion, and images of another size have theirs in proportion where the recipe changes
-- sizes; another number of epochs stretches all that happens in them. Where sizes change, each has
-- whole epochs, and its own part of the schedule: with few epochs a size may have none.
local lt = require "luatrain"

local recipes = {}

-- NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5: 250 epochs with mixup
-- ended at 78.3 to 78.6 % top1; 90 epochs without (--mixup 0 of train_recipe.lua) at 76.9 to
-- 77.2 %, 50 epochs at 75.8 %.
recipes.resnet50_78 = {
  arch = "resnet50", epochs = 250, batch = 2048, lr = 2.048, momentum = 0.875,
      weight_decay = 2.0 ^ -15,
  label_smoothing = 0.1, mixup = 0.2, schedule = lt.schedule.cosine{warmup = 8},
}

-- GluonCV's mobilenet1.0, by its log: logs/classification/imagenet/mobilenet1.0.log of
-- github.com/dmlc/web-data; 73.28 % top1. Colours were changed at random too, which is left out.
recipes.mobilenet_73 = {
  arch = "mobilenet_v1", epochs = 200, batch = 1024, lr = 0.4, momentum = 0.9, nesterov = true,
  weight_decay = 1e-4, label_smoothing = 0.1, mixup = 0.2,
      schedule = lt.schedule.cosine{warmup = 5},
}

-- Straight lines: {{from epoch, to epoch, value there, value here}, ...}.
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

-- fast.ai and DIUx: one machine of 8 V100 in train.py of github.com/cybertronai/imagenet18_old;
-- 93.0 % top5 in 109 minutes. Lambda repeated it: 75.92 % top1. Test images were rectangles at the
-- end, here they are squares. The batch follows the memory that images of a size take, and the rate
-- the batch.
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

-- ==== Running one ================================================================================

local function round(x) return math.max(1, math.floor(x + 0.5)) end

-- What becomes of a recipe's stages in so many epochs, which each has whole: those that still have
-- some, from which epoch on, and from which of the recipe's.
local function parts_of(recipe, epochs)
  local list, before, done = {}, 0, 0
  for _, stage in ipairs(recipe.sizes or {{epochs = recipe.epochs}}) do
    local last = math.floor((before + stage.epochs) * epochs / recipe.epochs + 0.5)
    if last > done then
      list[#list + 1] = {stage = stage, from = before, first = done, last = last}
    end
    before, done = before + stage.epochs, last
  end
  return list
end

-- The sizes of these parts for other batches and images.
local function sizes_of(recipe, parts, batch, side)
  local list = {}
  for i, part in ipairs(parts) do
    local stage = part.stage
    list[i] = {epochs = part.last - part.first, size = round(stage.size * side / 224),
               area = stage.area,
               batch = round((stage.batch or recipe.batch) * batch / recipe.batch)}
  end
  return list
end

-- The schedule, in which each part passes through its own stage: the rates of a stage are for its
-- batch.
local function schedule_of(recipe, parts)
  return function(epoch)
    local i = 1
    while epoch >= parts[i].last and parts[i + 1] do i = i + 1 end
    local part = parts[i]
    local share = (epoch - part.first) / (part.last - part.first)
    return recipe.schedule(part.from + share * part.stage.epochs, recipe.epochs)
  end
end

local spec = lt.check("recipes.fit(name, {; train:set, test:set, epochs?, batch?, accumulate=1, "
                      .. "mixup?:amount, target?:share})")

-- Trains a recipe's net and returns what lt.fit does.
function recipes.fit(name, given)
  local recipe, o = recipes[name], spec(given)
  if type(recipe) ~= "table" then
    error(("recipes.fit: '%s' is no recipe"):format(name), 2)
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
