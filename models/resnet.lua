-- resnet.lua - residual networks: He et al. 2015, Deep Residual Learning for Image Recognition,
-- arXiv:1512.03385.
--
--   resnet50{}                             for images of 224 x 224, 25,557,032 parameters
--   resnet20{classes = 10, channels = 1}   for small images, such as 32 x 32
--
-- A shortcut is the identity, or a 1x1 convolution where the shape changes (option B of the paper).
-- The bottleneck has its stride in the 3x3 convolution, as in torchvision; the paper has it in the
-- first 1x1 convolution. All nets accept other image sizes too. With sync_bn = true, batch norm is
-- synchronized over all ranks.
local lt = require "luatrain"
local nn = lt.nn

-- ==== Blocks =====================================================================================

local function conv(c_in, c, kernel, stride)
  return nn.conv2d{c_in, c, kernel, stride = stride, pad = kernel // 2, bias = false, init = "he"}
end

local function norm_of(o) return o.sync_bn and nn.sync_batch_norm or nn.batch_norm end

local function shortcut(c_in, c, stride, norm)
  if c_in == c and stride == 1 then return nil end
  return nn.sequential{conv(c_in, c, 1, stride), norm{c}}
end

-- A block maps c_in channels to block.widen * c channels. norm makes its batch norms; the scale of
-- the last one is initialized to `last`.
local basic = {widen = 1}
local bottleneck = {widen = 4}

function basic.new(c_in, c, stride, norm, last)
  return nn.module({
    conv1 = conv(c_in, c, 3, stride), bn1 = norm{c, act = "relu"},
    conv2 = conv(c, c, 3, 1), bn2 = norm{c, scale = last, act = "relu"},
    shortcut = shortcut(c_in, c, stride, norm),
  }, function(self, x)
    local y = self.bn1(self.conv1(x))
    return self.bn2(self.conv2(y), self.shortcut and self.shortcut(x) or x)
  end, "basic block")
end

function bottleneck.new(c_in, c, stride, norm, last)
  return nn.module({
    conv1 = conv(c_in, c, 1, 1), bn1 = norm{c, act = "relu"},
    conv2 = conv(c, c, 3, stride), bn2 = norm{c, act = "relu"},
    conv3 = conv(c, 4 * c, 1, 1), bn3 = norm{4 * c, scale = last, act = "relu"},
    shortcut = shortcut(c_in, 4 * c, stride, norm),
  }, function(self, x)
    local y = self.bn2(self.conv2(self.bn1(self.conv1(x))))
    return self.bn3(self.conv3(y), self.shortcut and self.shortcut(x) or x)
  end, "bottleneck")
end

-- Appends the stages, with counts[i] blocks in stage i, and the head. Each stage after the first
-- halves the height and width and doubles the channels.
local function finish(net, block, counts, c, o)
  local c_in, norm = c, norm_of(o)
  for i, count in ipairs(counts) do
    local blocks = {}
    for k = 1, count do
      local stride = i > 1 and k == 1 and 2 or 1
      blocks[k] = block.new(c_in, c, stride, norm, o.zero_init and 0 or 1)
      c_in = block.widen * c
    end
    net["stage" .. i] = nn.sequential(blocks)
    c = 2 * c
  end
  net.mean = nn.global_avg_pool2d()
  net.fc = nn.linear{c_in, o.classes}
  return nn.sequential(net)
end

-- ==== Nets for 224 x 224 (table 1) ===============================================================

local large = {
  resnet18  = {basic,      {2, 2,  2, 2}},
  resnet34  = {basic,      {3, 4,  6, 3}},
  resnet50  = {bottleneck, {3, 4,  6, 3}},
  resnet101 = {bottleneck, {3, 4, 23, 3}},
  resnet152 = {bottleneck, {3, 8, 36, 3}},
}

local function make_large(block, counts, o)
  return finish({
    conv1 = conv(o.channels, 64, 7, 2), bn1 = norm_of(o){64}, relu = nn.relu(),
    pool = nn.max_pool2d{3, stride = 2, pad = 1},
  }, block, counts, 64, o)
end

-- ==== Nets for small images (section 4.2) ========================================================

local small = {                        -- n: the net has 6 n + 2 layers
  resnet20 = 3,
  resnet32 = 5,
  resnet44 = 7,
  resnet56 = 9,
}

local function make_small(n, o)
  return finish({
    conv1 = conv(o.channels, 16, 3, 1), bn1 = norm_of(o){16}, relu = nn.relu(),
  }, basic, {n, n, n}, 16, o)
end

-- ==== Constructors by name =======================================================================

-- zero_init = true initializes the scale of the last norm of each block to 0, so that every block
-- starts as the identity. This helps with large batches.
local constructors = {}

for name, row in pairs(large) do
  local spec = lt.check(name .. "{; classes:count=1000, channels:count=3, zero_init=false, "
                        .. "sync_bn=false}")
  constructors[name] = function(options) return make_large(row[1], row[2], spec(options)) end
end

for name, n in pairs(small) do
  local spec = lt.check(name .. "{; classes:count=10, channels:count=3, zero_init=false, "
                        .. "sync_bn=false}")
  constructors[name] = function(options) return make_small(n, spec(options)) end
end

return constructors
