-- test_args.lua - flags of scripts.
local lt = require "luatrain"
local T = require "lt_test"

local defaults = {data = "x", epochs = 3, lr = 0.5, fast = false, max_steps = 10}
local NO_HINT = " (--help lists them; luatrain's own go before the script)"

-- Returns a function that reads flags with these defaults, and one that checks its error. A usage
-- error does not name a line of the script, because the script is correct.
local function reader(flags)
  local function read(...)
    arg = {[0] = "dir/script.lua", ...}
    return lt.args(flags)
  end
  return read, function(message, ...) T.equal({pcall(read, ...)}, {false, message}) end
end

local read, refuses = reader(defaults)

T.test("flags", function()
  T.equal(read(), defaults)
  T.equal(read("--data", "y", "--epochs=5", "--lr", "1", "--fast", "--max-steps", "7"),
          {data = "y", epochs = 5, lr = 1.0, fast = true, max_steps = 7})
  T.equal(read("--fast=false", "--data=", "--lr=1e-3", "--max_steps=1"),
          {data = "", epochs = 3, lr = 1e-3, fast = false, max_steps = 1})
end)

T.test("invalid flags", function()
  refuses("script.lua: unknown option '--epoch' (did you mean '--epochs'?)", "--epoch", "3")
  refuses("script.lua: unknown option 'stray'" .. NO_HINT, "stray")
  refuses("script.lua: --threads is an option of luatrain itself and goes before the script: "
          .. "luatrain --threads ... script.lua", "--threads", "2")
  refuses("script.lua: unknown option '--'" .. NO_HINT, "--")
  refuses("script.lua: --epochs must be a positive integer, but is '3.5'", "--epochs", "3.5")
  refuses("script.lua: --lr must be a non-negative number, but is 'big'", "--lr=big")
  refuses("script.lua: --fast must be true or false, but is '1'", "--fast=1")
  refuses("script.lua: --data requires a value", "--data")
  refuses("script.lua: --data requires a value", "--data", "--epochs", "3")
end)

T.test("a flag is suggested for the last word of its name", function()
  local _, refuses_decay = reader{weight_decay = 1e-4, decay_steps = 3}
  refuses_decay("script.lua: unknown option '--decay' (did you mean '--weight-decay'?)", "--decay",
                "1e-4")
end)

T.test("the sign of the default sets the smallest number", function()
  refuses("script.lua: --epochs must be a positive integer, but is '0'", "--epochs", "0")
  refuses("script.lua: --epochs must be a positive integer, but is '-1'", "--epochs", "-1")
  refuses("script.lua: --lr must be a non-negative number, but is '-0.1'", "--lr=-0.1")
  refuses("script.lua: --lr must be a non-negative number, but is '1e999'", "--lr=1e999")
  T.equal(read("--lr", "0").lr, 0.0)
  local free, refuses_free = reader{skip = 0, below = -1, gain = -0.5}
  T.equal(free("--skip", "0", "--below", "-7", "--gain", "-2"), {skip = 0, below = -7, gain = -2.0})
  refuses_free("script.lua: --skip must be a non-negative integer, but is '-1'", "--skip", "-1")
  refuses_free("script.lua: --gain must be a number, but is 'x'", "--gain", "x")
end)

T.test("choices", function()
  local choose, refuses_arch = reader{arch = {"resnet20", "resnet32", "vgg"}}
  local known = "script.lua: --arch must be one of resnet20, resnet32, vgg, but is "
  T.equal({choose().arch, choose("--arch", "vgg").arch}, {"resnet20", "vgg"})
  refuses_arch(known .. "'resnet23' (did you mean 'resnet20'?)", "--arch", "resnet23")
  refuses_arch(known .. "''", "--arch=")
end)

T.test("declarations", function()
  local wants = "lt.args: the default of %s must be a string, a number, a boolean or a list of "
                .. "strings"
  T.fails(function() lt.args{f = print} end, wants:format "f")
  T.fails(function() lt.args{f = {}} end, wants:format "f")
  T.fails(function() lt.args{f = {"a", 2}} end, wants:format "f")
  T.fails(function() lt.args{"a"} end, wants:format "1")
  T.fails(function() lt.args(3) end, "lt.args requires a table of defaults: lt.args{epochs = 3}")
  T.fails(function() lt.args{help = "x"} end, "lt.args: help must map names of flags to "
          .. "sentences: help = {epochs = \"how often\"}")
  T.fails(function() lt.args{epochs = 3, help = {epoch = "x"}} end,
          "lt.args: help has 'epoch', which is not a flag (did you mean 'epochs'?)")
  T.fails(function() lt.args{epochs = 3, help = {epochs = 3}} end,
          "lt.args: the help of epochs must be a string")
  arg = {[0] = "script.lua"}
  T.equal(lt.args{epochs = 3, help = {epochs = "x"}}, {epochs = 3})
end)

local folder = T.folder [[
local o = require "luatrain".args{
  arch = {"resnet20", "resnet32", "resnet44", "resnet56", "resnet18", "resnet34", "resnet50"},
  epochs = 3, lr = 0.5, fast = false, all = true, out = "", data = "fashion-mnist",
  help = {data = "fashion-mnist[:DIR], cifar10:DIR, images:DIR or synthetic:HxWxC/CLASSES",
          epochs = "passes over the images", arch = "what to train", out = "where"}}
print(o.epochs)]]

T.test("exit codes", function()
  local function run(flags)
    local text, code = T.run(folder, "t.lua " .. flags)
    return code .. text
  end
  T.equal(run "--epochs 4", "04\n")
  T.equal(run "--epoch 4",
          "2luatrain: t.lua: unknown option '--epoch' (did you mean '--epochs'?)\n")
  T.equal(run "--epochs -1",
          "2luatrain: t.lua: --epochs must be a positive integer, but is '-1'\n")
  T.equal(run "--help", [[
0usage: luatrain [luatrain options] t.lua [options]

  --data TEXT  fashion-mnist[:DIR], cifar10:DIR, images:DIR or
               synthetic:HxWxC/CLASSES (fashion-mnist)
  --arch NAME  what to train (resnet20): resnet20, resnet32, resnet44, resnet56,
               resnet18, resnet34, resnet50
  --epochs N   passes over the images (3)
  --lr X       (0.5)
  --all=false
  --fast
  --out TEXT   where
  --help       print this help

luatrain's own options go before the script: luatrain --help lists them.
]])
end)

T.finish()
