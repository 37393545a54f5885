-- train_recipe.lua - trains a net with a published recipe: see recipes.lua.
--
--   luatrain train_recipe.lua --recipe resnet50_fast --data images:DIR --batch 256 --target 0.756
--   luatrain train_recipe.lua --recipe mobilenet_73 --data images:DIR --batch 256 --epochs 30
local lt = require "luatrain"
local recipes = require "recipes"

local opt = lt.args{
  data = "synthetic:224x224x3/1000", recipe = {"resnet50_fast", "resnet50_78", "mobilenet_73"},
  epochs = 0, batch = 0, accumulate = 1, mixup = -1.0, target = 0.0,
  help = {
    data = "images:DIR, or synthetic:HxWxC/CLASSES",
    recipe = "recipe to run",
    epochs = "passes over the training images; 0: the recipe's",
    batch = "images per step; the learning rate scales with it; 0: the recipe's",
    accumulate = "micro-batches per step",
    mixup = "alpha of mixup; below 0: the recipe's",
    target = "top1 to reach; the run reports what it took",
  }}

local train, test = lt.data.open(opt.data, {center_crop = 0.875})
recipes.fit(opt.recipe, {
  train = train, test = test, accumulate = opt.accumulate,
  epochs = opt.epochs > 0 and opt.epochs or nil, batch = opt.batch > 0 and opt.batch or nil,
  mixup = opt.mixup >= 0 and opt.mixup or nil, target = opt.target > 0 and opt.target or nil,
})
