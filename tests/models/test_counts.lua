-- test_counts.lua - lt.models: parameter counts as published, shapes, names, options.
package.path = "tests/lua/?.lua;models/?.lua;" .. package.path
local lt = require "luatrain"
local models = lt.models
local T = require "lt_test"

-- From torchvision, for classes = 1000. MobileNet is from the paper's authors, with batch norm: 4.2
-- million in their table. In the nets for small images, shortcuts are 1x1 convolutions where the
-- shape changes. ResNet-20 has 272,474 = 464 (first layer) + 14,016 + 51,648 + 205,696 (stages) +
-- 650 parameters. The paper's 0.27 M is for shortcuts without parameters: 269,722.
local counts = {
  resnet18 = 11689512, resnet34 = 21797672, resnet50 = 25557032, resnet101 = 44549160,
  resnet152 = 60192808,
  resnet20 = 272474, resnet32 = 466906, resnet44 = 661338, resnet56 = 855770,
  vgg11 = 132863336, vgg13 = 133047848, vgg16 = 138357544, vgg19 = 143667240,
  vgg11_bn = 132868840, vgg13_bn = 133053736, vgg16_bn = 138365992, vgg19_bn = 143678248,
  mobilenet_v1 = 4231976,
  lenet = 421642,
  mlp = 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10,
}

T.test("parameter counts are as published; counting allocates no weights", function()
  local before = lt.memory().live
  for arch, count in pairs(counts) do
    local net = models[arch]()
    if net:count() ~= count then
      error(("%s has %d parameters, but the published count is %d"):format(arch, net:count(),
                                                                            count))
    end
  end
  assert(lt.memory().live - before < 1 << 20, "counting allocated weights")
end)

T.test("every model is in the table", function()
  local n = 0
  for arch in pairs(models) do
    assert(counts[arch], arch)
    n = n + 1
  end
  T.equal(n, 20)
end)

T.test("MobileNet by width", function()
  -- From keras.applications, minus the running statistics of batch norm, which it counts too.
  for width, count in pairs{[0.25] = 470072, [0.5] = 1331592, [0.75] = 2585560} do
    T.equal(models.mobilenet_v1{width = width}:count(), count)
  end
  T.equal(models.mobilenet_v1{width = 0.01}.blocks[13].pointwise.out, 10)
  T.equal(models.mobilenet_v1{width = 0.01}.conv.out, 8)
end)

-- Checks a forward pass of two images in both modes: finite logits of the right shape.
local function check_forward(net, height, width, channels, classes)
  local x = lt.randn({2, height, width, channels})
  for _, mode in ipairs{"train", "eval"} do
    net[mode](net)
    local y = lt.no_grad(function() return net(x) end)
    T.equal(y.shape, {2, classes})
    assert(y:sum():item() - y:sum():item() == 0, "finite")
  end
end

T.test("forward", function()
  check_forward(models.lenet{}, 28, 28, 1, 10)
  check_forward(models.lenet{channels = 3, size = 33, classes = 7}, 33, 33, 3, 7)
  check_forward(models.mlp{channels = 3, size = 9, hidden = 8, classes = 4}, 9, 9, 3, 4)
  check_forward(models.resnet20{}, 32, 32, 3, 10)
  check_forward(models.resnet20{channels = 1}, 28, 28, 1, 10)
  check_forward(models.resnet32{classes = 100}, 17, 23, 3, 100)
  check_forward(models.resnet18{classes = 5, channels = 1}, 64, 48, 1, 5)
  check_forward(models.mobilenet_v1{width = 0.25}, 64, 64, 3, 1000)
  check_forward(models.mobilenet_v1{width = 0.25, stride = 1, channels = 1, classes = 10}, 28, 28,
                1, 10)
  for _, arch in ipairs{"vgg11", "vgg11_bn"} do
    check_forward(models[arch]{classes = 10, size = 32, hidden = 64}, 32, 32, 3, 10)
    check_forward(models[arch]{classes = 3, size = 28, channels = 1, hidden = 8}, 28, 28, 1, 3)
  end
end)

T.test("a bottleneck has its stride in the 3x3", function()
  local net = models.resnet50{classes = 2}
  local first = net.stage2[1]
  T.equal({first.conv1.stride, first.conv2.stride, first.conv3.stride}, {1, 2, 1})
  T.equal(first.shortcut[1].stride, 2)
  T.equal({#net.stage1, #net.stage2, #net.stage3, #net.stage4}, {3, 4, 6, 3})
  T.equal(net.stage2[2].shortcut, nil)
  local x = lt.randn({1, 8, 8, 256})
  first = lt.nn.sequential{models.resnet50{}.stage2[1]}
  T.equal(first(x).shape, {1, 4, 4, 512})
end)

T.test("VGG's first linear layer follows the size", function()
  T.equal(models.vgg16{}.classifier.fc1["in"], 7 * 7 * 512)
  T.equal(models.vgg16{size = 64}.classifier.fc1["in"], 2 * 2 * 512)
  T.equal(models.vgg16{size = 32}.classifier.fc1["in"], 512)
  T.equal(models.vgg16{size = 1}.classifier.fc1["in"], 512)
end)

T.test("initial values", function()
  local net = models.resnet20{zero_init = true}
  net:parameters()
  T.equal(net.stage1[1].bn2.scale:sum():item(), 0.0)
  T.equal(net.stage1[1].bn1.scale:mean():item(), 1.0)
  local w = net.stage3[2].conv1.w
  T.near((w * w):mean():item() ^ 0.5, math.sqrt(2 / (9 * 64)), 0.002)
  T.near(lt.abs(net.fc.w):max():item(), 1 / 8, 0.01)
  net = models.resnet20{}
  net:parameters()
  T.equal(net.stage1[1].bn2.scale:sum():item(), 16.0)
end)

T.test("sync_bn replaces every batch norm", function()
  for _, name in ipairs{"resnet20", "resnet50", "mobilenet_v1", "vgg16_bn"} do
    local sync, plain = tostring(models[name]{sync_bn = true}), tostring(models[name]{})
    assert(not sync:find " batch_norm" and not plain:find "sync")
    T.equal((sync:gsub("sync_", ""):gsub(" +", " ")), (plain:gsub(" +", " ")))
  end
end)

T.test("parameter names", function()
  local names = {}
  for name in models.resnet18{}:named_parameters() do names[#names + 1] = name end
  T.equal(names[1], "conv1.w")
  T.equal(names[#names], "fc.b")
  T.equal(table.concat(names, " ", 16, 21), "stage2.1.conv1.w stage2.1.bn1.scale "
          .. "stage2.1.bn1.shift stage2.1.conv2.w stage2.1.bn2.scale stage2.1.bn2.shift")
end)

T.test("bad options are refused", function()
  T.fails(function() models.resnet50{clases = 10} end,
          "resnet50: unknown key 'clases' (did you mean 'classes'?)")
  T.fails(function() models.resnet20{classes = 0} end,
          "resnet20: 'classes' must be a positive integer, but is 0")
  T.fails(function() models.mobilenet_v1{width = -1} end,
          "mobilenet_v1: 'width' must be a non-negative number, but is -1")
  T.fails(function() models.lenet(10) end,
          "lenet requires one table: lenet{classes=10, channels=1, size=28}, but got 10")
  T.fails(function() models.vgg16_bn{width = 3} end, "vgg16_bn: unknown key 'width': "
          .. "vgg16_bn{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5, "
          .. "sync_bn=false}")
  T.fails(function() models.vgg16{sync_bn = true} end, "vgg16: unknown key 'sync_bn': "
          .. "vgg16{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5}")
  T.fails(function() return models.resnet51 end,
          "models has no 'resnet51' (did you mean 'resnet50'?)")
end)

T.test("an image of the wrong shape is reported at the caller's line", function()
  local net = models.resnet20{}
  T.fails(function() net(lt.ones({1, 32, 32, 1})) end, "net.conv1 conv2d: w has 3 input channels, "
                                                       .. "but x has 1 (x 1x32x32x1 f32, w "
                                                       .. "16x3x3x3 f32)")
end)

T.test("the files are modules too", function()
  T.equal(require "resnet".resnet18{}:count(), counts.resnet18)
  T.equal(require "lenet".lenet{}:count(), counts.lenet)
end)

T.finish()
