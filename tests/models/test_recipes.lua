-- test_recipes.lua - the recipes: 20 steps of each, their settings, and how schedules stretch.
-- ResNet-50 runs 20 steps with LUATRAIN_TEST_SLOW=1; otherwise it runs 2, and ResNet-20 runs 20.
package.path = "tests/lua/?.lua;models/?.lua;" .. package.path
local lt = require "luatrain"
local recipes = require "recipes"
local T = require "lt_test"

local slow = os.getenv "LUATRAIN_TEST_SLOW" == "1"
local here = io.popen("pwd"):read "l"

-- Returns the numbers of a field in all lines of an event.
local function numbers(folder, event, field)
  local list = {}
  for line in io.lines(folder .. "/metrics.jsonl") do
    if line:find('^{"event":"' .. event .. '"') then
      list[#list + 1] = tonumber(line:match('"' .. field .. '":(-?[%d.e+-]+)'))
    end
  end
  return list
end

-- Runs `steps` steps of train_recipe.lua and checks the learning rates. `batch` is the batch size,
-- `rate` the learning rate at factor 1. The single epoch of the run covers those of the recipe from
-- `first` to `last`.
local function check_script(name, steps, batch, rate, first, last)
  local folder, recipe = T.folder(), recipes[name]
  local text, code = T.run(folder, ("--quiet --max-steps %d --out . %s/models/train_recipe.lua "
    .. "--recipe %s --data synthetic:16x16x3/5/400 --batch 8 --epochs 1"):format(steps, here, name))
  if code ~= 0 then error(text) end
  local losses, rates = numbers(folder, "step", "loss"), numbers(folder, "step", "lr")
  T.equal({#losses, #rates}, {steps, steps})
  for i, loss in ipairs(losses) do
    assert(loss > 0 and loss < 100, loss)
    local epoch = first + (i - 0.5) * batch / 400 * (last - first)
    T.near(rates[i], rate * recipe.schedule(epoch, recipe.epochs), 1e-12)
  end
end

T.test("steps of train_recipe.lua", function()
  check_script("mobilenet_73", T.cases(20, 2), 8, 8 * 0.4 / 1024, 0, 200)
  check_script("resnet50_78", slow and 20 or 2, 8, 8 * 2.048 / 2048, 0, 250)
  check_script("resnet50_fast", slow and 20 or 2, 4, 8 / 4096, 13, 25)    -- the 224 x 224 stage
end)

T.test("the schedule of resnet50_fast accounts for the batch of each stage", function()
  local f, ulp = recipes.resnet50_fast.schedule, 2.0 ^ -52
  for _, point in ipairs{{0, 1}, {3.5, 1.5}, {7, 2}, {10, 1.125}, {13, 0.4375}, {22, 0.04375},
                         {23.5, 0.0240625}, {25, 0.0025}, {28, 0.00025}, {29, 0.00025}} do
    T.near(f(point[1], 28), point[2], ulp)
  end
end)

-- Trains a recipe with a ResNet-20 on 16 images. Returns the settings of lt.fit.
local function fit(name, side, given)
  local recipe, lt_fit, settings = recipes[name], lt.fit, nil
  local arch = recipe.arch
  given.train, given.test = lt.data.open(("synthetic:%dx%dx3/2/16"):format(side, side))
  recipe.arch = "resnet20"
  lt.fit = function(o)
    settings, o.out = o, T.folder() .. "/out"
    return lt_fit(o)
  end
  recipes.fit(name, given)
  lt.fit, recipe.arch = lt_fit, arch
  return settings
end

T.test("sizes, batches and rates scale with epochs, images and batch", function()
  local o = fit("resnet50_fast", 28, {epochs = 5, batch = 8, target = 0.25})
  T.equal(o.sizes, {{area = 0.08, batch = 8, epochs = 2, size = 16},
                    {area = 0.087, batch = 4, epochs = 2, size = 28},
                    {area = 0.5, batch = 2, epochs = 1, size = 36}})
  T.equal(numbers(o.out, "epoch", "size"), {16, 16, 28, 28, 36})
  local rates, middles = numbers(o.out, "step", "lr"), {}
  for epoch, steps in ipairs{2, 2, 4, 4, 8} do
    for i = 1, steps do middles[#middles + 1] = epoch - 1 + (i - 0.5) / steps end
  end
  T.equal({#rates, #middles}, {20, 20})
  local function recipe_epoch(epoch)
    return epoch < 2 and epoch * 13 / 2 or epoch < 4 and 13 + (epoch - 2) * 12 / 2
           or 25 + (epoch - 4) * 3
  end
  for i, middle in ipairs(middles) do
    T.near(rates[i], 8 / 4096 * recipes.resnet50_fast.schedule(recipe_epoch(middle)), 1e-12)
  end
  T.equal(o.target, 0.25)
  o = fit("resnet50_78", 8, {epochs = 10, batch = 8, accumulate = 2})
  T.equal(#numbers(o.out, "step", "loss"), 20)
  T.equal({o.mixup, o.label_smoothing, o.sizes, o.optim.weight_decay, o.optim.decay_bias},
          {0.2, 0.1, nil, 1 / 32768, false})
  T.equal(fit("mobilenet_73", 8, {epochs = 1, batch = 8, mixup = 0}).mixup, 0)
end)

T.test("each size has the learning rates of its phase, for any number of epochs", function()
  local recipe, lt_fit, o = recipes.resnet50_fast, lt.fit, nil
  local set, arch = lt.data.open "synthetic:28x28x3/2/16", recipe.arch
  lt.fit = function(given) o = given end
  recipe.arch = "resnet20"                       -- 60 nets are made
  for epochs = 1, 60, T.cases(1, 7) do
    recipes.fit("resnet50_fast", {train = set, test = set, epochs = epochs, batch = 8})
    local first = 0
    for _, size in ipairs(o.sizes) do
      local from, to = 0, 0
      for _, phase in ipairs(recipe.sizes) do
        from, to = to, to + phase.epochs
        if phase.size / 8 == size.size then break end
      end
      for fraction = 0.0, 0.99, 0.03 do
        T.near(o.schedule(first + fraction * size.epochs, epochs),
               recipe.schedule(from + fraction * (to - from)), 1e-9)
      end
      first = first + size.epochs
    end
    T.equal(first, epochs)
  end
  lt.fit, recipe.arch = lt_fit, arch
end)

T.test("bad arguments are refused", function()
  local set = lt.data.open "synthetic:8x8x3/2/16"
  local function refused(message, ...)
    local ok, why = pcall(recipes.fit, ...)
    assert(not ok and why:find(message, 1, true), why)
  end
  refused("recipes has no 'resnet50_79' (did you mean 'resnet50_78'?)", "resnet50_79", {})
  T.fails(function() recipes.fit("fit", {train = set, test = set}) end,
          "recipes.fit: unknown recipe 'fit'")
  refused("recipes.fit: unknown key 'epoch' (did you mean 'epochs'?)", "resnet50_78", {epoch = 1})
end)

T.finish()
