-- test_scripts.lua - two steps of each script in models/, at image sizes that suit its nets, and
-- the script's flags. Two scripts also run to the end. test_recipes.lua tests train_recipe.lua.
package.path = "tests/lua/?.lua;" .. package.path
local lt = require "luatrain"
local T = require "lt_test"

local folder = os.tmpname()
os.remove(folder)

-- Returns the exit code and output of `luatrain options models/train_NAME.lua flags`.
local function run(options, name, flags)
  local command = ("%s %s models/train_%s.lua %s 2>&1"):format(T.program(), options, name, flags)
  local pipe = assert(io.popen(command))
  local text = pipe:read "a"
  local _, _, code = pipe:close()
  return code, text
end

-- Trains for two steps and checks that the checkpoint has the weights of the chosen net.
local function two_steps(name, flags, tensor, shape)
  local out = ("%s/%s"):format(folder, name)
  local code, text = run(("--quiet --max-steps 2 --resume never --out %s"):format(out), name, flags)
  if code ~= 0 then error(("train_%s.lua %s: exit code %d: %s"):format(name, flags, code, text)) end
  local tensors = lt.load(out .. "/step-00000002.safetensors")
  T.equal(tensors["net." .. tensor].shape, shape)
end

T.test("two steps of each script", function()
  two_steps("lenet", "--data synthetic:28x28x1/7/300", "fc1.w", {128, 3136})
  two_steps("resnet", "--data synthetic:32x32x3/10/300 --batch 16", "stage3.3.conv2.w",
            {64, 3, 3, 64})
  two_steps("mobilenet", "--data synthetic:32x32x3/10/300 --batch 8 --width 0.25", "fc.w",
            {10, 256})
  two_steps("vgg", "--data synthetic:28x28x1/10/300 --batch 8", "classifier.fc1.w", {512, 512})
end)

if T.cases(true, false) then
  T.test("two steps of other nets", function()
    two_steps("lenet", "--data synthetic:32x32x3/7/300 --arch mlp", "fc1.w", {256, 3072})
    two_steps("resnet", "--data synthetic:96x96x3/5/40 --arch resnet18 --batch 2", "fc.w", {5, 512})
    two_steps("mobilenet", "--data synthetic:224x224x3/5/40 --batch 2 --width 1", "fc.w", {5, 1024})
    two_steps("vgg", "--data synthetic:64x64x3/10/300 --batch 2 --arch vgg13", "classifier.fc1.w",
              {512, 2048})
  end)
end

T.test("two scripts run to the end", function()
  for _, name in ipairs(T.cases({"lenet", "resnet"}, {"lenet"})) do
    local out = ("%s/%s-whole"):format(folder, name)
    local code, text = run("--out " .. out, name,
                           "--data synthetic:16x16x3/3/256 --batch 16 --epochs 2 --lr 0.02")
    if code ~= 0 then error(text) end
    local top1 = tonumber(text:match "epoch 2/2.-top1 ([%d.]+) %%")
    assert(top1 and top1 > 60, text)            -- chance is a third
    assert(lt.load(out .. "/weights.safetensors"))
  end
end)

T.test("the scripts' flags and --help", function()
  for _, name in ipairs{"lenet", "resnet", "mobilenet", "vgg"} do
    local code, text = run("", name, "--help")
    T.equal(code, 0)
    for flag in ("data arch epochs batch lr"):gmatch "%w+" do
      assert(text:find("\n  --" .. flag .. " ", 1, true), text)
    end
    for line in text:gmatch "[^\n]+" do assert(#line <= 80, line) end
    code, text = run("", name, "--epoch 3")
    T.equal(code, 2)
    T.equal(text, ("luatrain: train_%s.lua: unknown option '--epoch' (did you mean '--epochs'?)\n")
                  :format(name))
  end
end)

os.execute("rm -rf " .. folder)
T.finish()
