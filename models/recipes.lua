-- recipes.lua - how others have trained nets on ImageNet, as settings of lt.fit.
--
--   local recipes = require "recipes"
--   recipes.fit("resnet50_fast", {train = train, test = test, epochs = 10, batch = 256})
--
-- A recipe is for batches of `batch` and for images of 224 x 224. Another batch has its learning
-- rate in proportion, and images of another size have theirs in proportion where the recipe changes
-- sizes; another number of epochs stretches all that happens in them.
local lt = require "luatrain"

local recipes = {}

-- NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5: 250 epochs with mixup
-- ended at 78.3 to 78.6 % top1; 90 epochs without (--mixup 0 of train_recipe.lua) at 76.9 to
-- 77.2 %, 50 epochs at 75.8 %.
recipes.resnet50_78 = {
  arch = "resnet50", epochs = 250, batch = 2048, lr = 2.048, momentum = 0.875, decay = 2.0 ^ -15,
  smoothing = 0.1, mixup = 0.2, schedule = lt.schedule.cosine{warmup = 8},
}

-- GluonCV's mobilenet1.0, by its log: logs/classification/imagenet/mobilenet1.0.log of
-- github.com/dmlc/web-data; 73.28 % top1. Colours were changed at random too, which is left out.
recipes.mobilenet_73 = {
  arch = "mobilenet_v1", epochs = 200, batch = 1024, lr = 0.4, momentum = 0.9, nesterov = true,
  decay = 1e-4, smoothing = 0.1, mixup = 0.2, schedule = lt.schedule.cosine{warmup = 5},
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
  momentum = 0.9, decay = 1e-4,
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

-- The sizes of a recipe for other epochs, batches and images.
local function stages(recipe, epochs, batch, side)
  local list, before, done = {}, 0, 0
  for _, stage in ipairs(recipe.sizes) do
    before = before + stage.epochs
    local own = math.floor(before * epochs / recipe.epochs + 0.5) - done
    if own > 0 then
      list[#list + 1] = {epochs = own, size = round(stage.size * side / 224), area = stage.area,
                         batch = round((stage.batch or recipe.batch) * batch / recipe.batch)}
    end
    done = done + own
  end
  return list
end

local spec = lt.check("recipes.fit(name, {; train:set, test:set, epochs?, batch?, accumulate=1, "
                      .. "mixup?:amount, target?:share})")

-- Trains a recipe's net and returns what lt.fit does.
function recipes.fit(name, given)
  local recipe, o = recipes[name], spec(given)
  local epochs, batch = o.epochs or recipe.epochs, o.batch or recipe.batch
  local options = {classes = o.train.classes, channels = o.train.channels}
  for key, value in pairs(recipe.options or {}) do options[key] = value end
  local net = lt.models[recipe.arch](options)
  local function schedule(epoch)
    return recipe.schedule(epoch * recipe.epochs / epochs, recipe.epochs)
  end
  return lt.fit{
    net = net, train = o.train, test = o.test, epochs = epochs, batch = batch,
    optim = lt.optim.sgd(net, {
      lr = lt.schedule.lr_for_batch{recipe.lr, batch, per = recipe.batch},
      momentum = recipe.momentum, nesterov = recipe.nesterov, decay = recipe.decay,
      decay_bias = false}),
    schedule = schedule,
    sizes = recipe.sizes and stages(recipe, epochs, batch, o.train.height),
    smoothing = recipe.smoothing, mixup = o.mixup or recipe.mixup, accumulate = o.accumulate,
    target = o.target,
  }
end

return lt.check.strict(recipes, "recipes")
