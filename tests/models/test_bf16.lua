-- test_bf16.lua - from the same initial weights, residual nets learn Fashion-MNIST in bf16 as well
-- as in f32. By default, this trains a small net on some of the images; LUATRAIN_TEST_SLOW=1 adds
-- ResNet-20.
package.path = "tests/lua/?.lua;" .. package.path
local lt = require "luatrain"
local T = require "lt_test"
local nn = lt.nn

local slow = os.getenv "LUATRAIN_TEST_SLOW" == "1"
local top = os.tmpname()
os.remove(top)

local function part(set, n)
  return lt.data.set{images = set.images:slice(1, 1, n), labels = set.labels:slice(1, 1, n),
                     classes = set.classes, mean = set.mean, std = set.std}
end

local function conv(c_in, c, stride)
  return nn.conv2d{c_in, c, 3, stride = stride, pad = 1, bias = false, init = "he"}
end

local function block(c)
  return nn.residual{body = nn.sequential{conv(c, c, 1), nn.batch_norm{c}, nn.relu(),
                                          conv(c, c, 1), nn.batch_norm{c}}}
end

local function small_net()
  return nn.sequential{conv(1, 8, 2), nn.batch_norm{8}, nn.relu(), block(8), nn.relu(),
                       conv(8, 16, 2), nn.batch_norm{16}, nn.relu(), block(16), nn.relu(),
                       nn.global_avg_pool2d(), nn.linear{16, 10}}
end

-- Returns the results of lt.fit in f32 and in bf16.
local function both(make_net, train, test, epochs, lr)
  local nets, results = {off = make_net(), bf16 = make_net()}, {}
  lt.save(top, nets.off)
  for amp, net in pairs(nets) do
    net:load(top)
    results[amp] = lt.fit{
      net = net, train = train, test = test, epochs = epochs, batch = 64, augment = {flip = true},
      optim = lt.optim.sgd(net, {lr = lr, momentum = 0.9, nesterov = true, weight_decay = 5e-4,
                                 decay_bias = false}),
      schedule = lt.schedule.cosine{warmup = 0.5}, amp = amp, resume = "never",
      out = top .. "-" .. amp}
  end
  return results.off, results.bf16
end

-- Checks that the accuracy of f32 is above `least` and that of bf16 is lower by less than margin.
local function compare(name, least, margin, f32, bf16)
  print(("%s: top-1 %.4f in f32, %.4f in bf16; loss %.4f, %.4f"):format(
        name, f32.top1, bf16.top1, f32.loss, bf16.loss))
  assert(f32.top1 > least, f32.top1)
  assert(bf16.top1 > f32.top1 - margin, bf16.top1)
  assert(bf16.loss ~= f32.loss)                        -- the computations differ
end

if not pcall(lt.data.open, "fashion-mnist") then
  T.skip("training in bf16", "Fashion-MNIST is not installed")
  T.finish()
end
local train, test = lt.data.open "fashion-mnist"

T.test("a small residual net", function()
  compare("small", 0.6, 0.04, both(small_net, part(train, 2560), part(test, 2000), 3, 0.1))
end)

if slow then
  T.test("ResNet-20", function()
    local function resnet20() return lt.models.resnet20{channels = 1} end
    compare("ResNet-20", 0.75, 0.03, both(resnet20, part(train, 8000), test, 2, 0.1))
  end)
end

os.execute(("rm -rf %s %s-off %s-bf16"):format(top, top, top))
T.finish()
