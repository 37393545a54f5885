-- nn.lua - constructors of modules. Operations without parameters or modes are also plain
-- functions: lt.relu(x), x + y. A constructor takes one table: nn.conv2d{3, 64, 3, stride = 2}. The
-- string above it declares the keys of the table, with their kinds and defaults: see check.lua.

local core = ...
local check = require "luatrain.check"
local module = require "luatrain.api.module"
local ops = core.ops
local new, is_module, is_list = module.new, module.is_module, module.is_list
local KEY = core.module_key

local nn = {}

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- nn.module(fields, forward[, text]): a custom module. forward(self, ...) computes its result from
-- the fields; tostring shows text. The table of fields itself becomes the module.
function nn.module(fields, forward, text)
  if not is_list(fields) or type(forward) ~= "function" then
    fail("nn.module requires a table of fields and a function: "
         .. "nn.module({conv = nn.conv2d{...}}, function(self, x) ... end)")
  elseif text ~= nil and type(text) ~= "string" then
    fail("nn.module: text must be a string, but is %s", check.shown(text))
  end
  return new(text or "module", fields, forward)
end

-- ==== Parameters =================================================================================

local initial = check("nn.parameter(shape, {; value=0.0, low?:number, high?:number, mean?:number, "
                      .. "deviation?:number})")

local function make_tensor(shape, given, buffer)
  local init = initial(given)
  local uniform, normal = init.low or init.high, init.mean or init.deviation
  if uniform and normal or (uniform or normal) and given.value then
    fail "nn.parameter: give only one of value, low and high, or mean and deviation"
  end
  local kind, a, b = "constant", init.value, 0
  if uniform then kind, a, b = "uniform", init.low or 0, init.high or 0 end
  if normal then kind, a, b = "normal", init.mean or 0, init.deviation or 1 end
  return module.tensor(shape, kind, a, b, buffer)
end

-- A learnable field. init is {value = 0}, a constant; {low = -0.1, high = 0.1}, uniform; or
-- {mean = 0, deviation = 1}, normal.
function nn.parameter(shape, init) return make_tensor(shape, init, false) end
-- A field that is saved but not trained, with the same options.
function nn.buffer(shape, init) return make_tensor(shape, init, true) end

-- Returns weights of a shape, and a bias (out) if f.bias, else nil. f.init is their initialisation:
--   "uniform"  PyTorch's default: weights and bias uniform within +-1 / sqrt(fan_in)
--   "he"       normal with standard deviation sqrt(2 / fan_out), which preserves the variance of
--              gradients through layers with relu (He et al. 2015, arXiv:1502.01852, section 2.2);
--              bias 0
--   a number   normal with this standard deviation; bias 0
local function weights(shape, f, fan_in, fan_out)
  local start, bias
  if f.init == "uniform" then
    local bound = 1 / math.sqrt(fan_in)
    start = {low = -bound, high = bound}
    bias = start
  else
    start = {mean = 0, deviation = f.init == "he" and math.sqrt(2 / fan_out) or f.init}
  end
  return nn.parameter(shape, start), f.bias and nn.parameter({f.out}, bias) or nil
end

-- ==== Modules with parameters ====================================================================

local conv2d = check("nn.conv2d{in, out, kernel:pair; stride:pair=1, pad:pair=0, dilation:pair=1, "
                     .. "groups:count=1, bias=true, init:init=uniform}")

-- Maps x (n, h, w, in) to (n, h', w', out). Weights w: (out, kh, kw, in / groups); bias b: (out).
-- kernel, stride, pad (on each side) and dilation: a number, or {height, width}.
function nn.conv2d(given)
  local f, text = conv2d(given)
  local kernel = type(f.kernel) == "table" and f.kernel or {f.kernel, f.kernel}
  local each_group = f["in"] // f.groups
  if f["in"] % f.groups ~= 0 or f.out % f.groups ~= 0 then
    fail("nn.conv2d: 'groups' must divide 'in' and 'out', but they are %d, %d and %d", f.groups,
         f["in"], f.out)
  end
  local area = math.max(kernel[1] * kernel[2], 1)
  f.w, f.b = weights({f.out, kernel[1], kernel[2], each_group}, f, area * each_group,
                     area * f.out // f.groups)
  return new(text, f, function(self, x)
    return ops.conv2d(x, self.w, self.b, self.stride, self.pad, self.dilation, self.groups)
  end)
end

local linear = check "nn.linear{in, out; bias=true, init:init=uniform}"

-- Maps x (..., in) to x w^T + b (..., out). Weights w: (out, in); bias b: (out).
function nn.linear(given)
  local f, text = linear(given)
  f.w, f.b = weights({f.out, f["in"]}, f, f["in"], f.out)
  return new(text, f, function(self, x) return ops.linear(x, self.w, self.b) end)
end

-- Batch norm: norm(x) is act(normalised x), and norm(x, residual) is act(normalised x + residual).
-- act is "none", "relu" or "relu6". x: (..., channels).
-- scale is the initial value of the scale parameter. With 0 in the last norm of a residual branch,
-- the block starts as the identity (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
local function dims_of(x) return core.is_tensor(x) and table.concat(x.shape, "x") end
local function norm_takes(self) return self.act == "none", self.act == "none" end

-- nn.sync_batch_norm normalises by the mean and variance of the whole batch over all ranks. All
-- ranks must call it the same number of times.
for name, sync in pairs{batch_norm = false, sync_batch_norm = true} do
  local spec = check("nn." .. name .. "{channels; momentum=0.1, eps=1e-5, scale=1.0, act:act=none}")
  nn[name] = function(given)
    local f, text = spec(given)
    f.scale, f.shift = nn.parameter({f.channels}, {value = f.scale}), nn.parameter({f.channels})
    f.mean, f.var = nn.buffer({f.channels}), nn.buffer({f.channels}, {value = 1})
    return new(text, f, function(self, x, residual, act)
      act = act or self.act
      local behind = residual and dims_of(residual) ~= dims_of(x)  -- broadcasts: add afterwards
      if residual and not behind and core.amp() ~= "off" and residual.dtype ~= x.dtype then
        residual = residual:cast(x.dtype)
      end
      local y = ops.batch_norm(x, self.scale, self.shift, self.mean, self.var,
                               not behind and residual or nil, self.training, self.momentum,
                               self.eps, behind and "none" or act, sync)
      if not behind then return y end
      y = y + residual
      return act == "none" and y or ops[act](y)
    end, name, norm_takes)
  end
end

local layer_norm = check "nn.layer_norm{n; eps=1e-5}"

-- Normalises over the last axis of x (..., n). eps is added to the variance.
function nn.layer_norm(given)
  local f, text = layer_norm(given)
  f.scale, f.shift = nn.parameter({f.n}, {value = 1}), nn.parameter({f.n})
  return new(text, f, function(self, x)
    return ops.layer_norm(x, self.scale, self.shift, self.eps)
  end)
end

local group_norm = check "nn.group_norm{groups, channels; eps=1e-5}"

-- Normalises each x[i] over groups of adjacent channels, for x (n, ..., channels). Does not depend
-- on the batch, nor on the mode. eps is added to the variance.
function nn.group_norm(given)
  local f, text = group_norm(given)
  if f.channels % f.groups ~= 0 then
    fail("nn.group_norm: 'groups' must divide 'channels', but they are %d and %d", f.groups,
         f.channels)
  end
  f.scale, f.shift = nn.parameter({f.channels}, {value = 1}), nn.parameter({f.channels})
  return new(text, f, function(self, x)
    return ops.group_norm(x, self.scale, self.shift, self.groups, self.eps)
  end)
end

local embedding = check "nn.embedding{rows, dim}"

-- Maps ids, integers counted from 0, of any shape (...) to rows of w: (..., dim). w: (rows, dim).
function nn.embedding(given)
  local f, text = embedding(given)
  f.w = nn.parameter({f.rows, f.dim}, {mean = 0, deviation = 1})
  return new(text, f, function(self, ids) return ops.embedding(self.w, ids) end)
end

-- ==== Modules of modules =========================================================================
--
-- Batch norm can add a residual and apply an activation in its own pass over memory. A module that
-- ends with a batch norm therefore accepts both as arguments: module(x, residual, act). nn.residual
-- and nn.sequential pass them where the module accepts them.

local function kind_of(layer) return is_module(layer) and layer[KEY].kind end

-- "relu" or "relu6" if a layer is that activation, as a module or a function; else nil.
local function act_of(layer)
  for _, name in ipairs{"relu", "relu6"} do
    if layer == ops[name] or kind_of(layer) == name then return name end
  end
end

-- Returns whether a layer accepts an activation, and whether it accepts a residual.
local function takes(layer)
  local asks = is_module(layer) and layer[KEY].takes
  if asks then return asks(layer) end
  return false, false
end

-- Runs the layers of self on x in the order of the keys in `order`, or by number if it is nil, and
-- fuses activations where it can. The last layer gets residual and act.
local function run(self, order, x, residual, act)
  local i, n = 1, #(order or self)
  local function layer_at(k) return self[order and order[k] or k] end
  while i <= n do
    local layer, behind = layer_at(i), i < n and layer_at(i + 1)
    local act_behind = act_of(behind)
    if act_behind and takes(layer) then
      x, i = layer(x, nil, act_behind), i + 2
    elseif act_of(layer) and kind_of(behind) == "max_pool2d" then
      x, i = layer(behind(x)), i + 2             -- the same result, on fewer elements
    elseif i == n and (residual or act) then
      x, i = layer(x, residual, act), i + 1
    else
      x, i = layer(x), i + 1
    end
  end
  return x
end

local function check_layer(key, value)
  for name, constructor in pairs(nn) do
    if value == constructor then
      fail("nn.sequential: layer %s is the constructor nn.%s; write nn.%s{...}", key, name, name)
    end
  end
  if not is_module(value) and type(value) ~= "function" then
    fail("nn.sequential: layer %s must be a module or a function, but is a %s", key, type(value))
  end
  if type(key) == "string" and type(value) == "function" then
    fail("nn.sequential: layer '%s' is a function, which has no order among named layers; use a "
         .. "module, or number the layers", key)
  end
end

local function by_number(layers)
  return new("sequential", layers, function(self, ...) return run(self, nil, ...) end,
             "sequential", function(self) return takes(self[#self]) end)
end

local function by_name(layers)
  local order
  local self = new("sequential", layers, function(self, ...) return run(self, order, ...) end,
                   "sequential", function(self) return takes(self[order[#order]]) end)
  order = module.fix_parts(self)
  return self
end

-- Runs layers in sequence: modules and functions by number, or modules by name. Named layers run in
-- the order in which they were made; in a table constructor, that is the order of the text. The
-- string field `name` is the name of the root in messages.
function nn.sequential(layers)
  if not is_list(layers) then
    fail("nn.sequential requires one table of layers: nn.sequential{nn.conv2d{...}, lt.relu}")
  end
  local numbers, names = 0, 0
  for key, value in pairs(layers) do
    if key ~= "name" or type(value) ~= "string" then
      check_layer(key, value)
      if math.type(key) then numbers = numbers + 1 else names = names + 1 end
    end
  end
  if numbers > 0 and names > 0 then
    fail("nn.sequential: layers must have numbers or names, not both")
  end
  for i = 1, numbers do
    if layers[i] == nil then fail("nn.sequential: layer %d is nil", i) end
  end
  return names > 0 and by_name(layers) or by_number(layers)
end

local residual = check "nn.residual{body:layer; skip?:layer}"

local function residual_takes(self)
  local act, sum = takes(self.body)
  return act and sum, false
end

-- body(x) + x, or body(x) + skip(x).
function nn.residual(given)
  return new("residual", residual(given), function(self, x, _, act)
    local short = x
    if self.skip then short = self.skip(x) end
    local _, sum = takes(self.body)
    if sum then return self.body(x, short, act) end
    return self.body(x) + short
  end, "residual", residual_takes)
end

-- ==== Modules without parameters =================================================================

-- nn.relu() is a module that calls lt.relu. Every op of one tensor without options has a module.
for name in pairs(ops) do
  if core.help(name):find("^" .. name .. "%(x%)\n") then
    local spec = check("nn." .. name .. "{}")
    nn[name] = function(given)
      local f, text = spec(given)
      return new(text, f, function(_, x) return ops[name](x) end, name)
    end
  end
end

-- Pooling over windows of x (n, h, w, c); pad applies on each side.
for _, name in ipairs{"max_pool2d", "avg_pool2d"} do
  local spec = check("nn." .. name .. "{kernel:pair; stride:pair=kernel, pad:pair=0}")
  nn[name] = function(given)
    local f, text = spec(given)
    return new(text, f, function(self, x)
      return ops[name](x, self.kernel, self.stride, self.pad)
    end, name)
  end
end

local dropout = check "nn.dropout{p=0.5}"

-- In training mode, sets each element to 0 with probability p and divides the others by 1 - p.
function nn.dropout(given)
  local f, text = dropout(given)
  return new(text, f, function(self, x) return ops.dropout(x, self.p, self.training) end)
end

local flatten_spec = check "nn.flatten{}"

-- Reshapes (n, h, w, c) to (n, h w c).
function nn.flatten(given)
  local f, text = flatten_spec(given)
  return new(text, f, function(_, x)
    if not core.is_tensor(x) then fail("flatten: x must be a tensor, but is %s", check.shown(x)) end
    local features = 1
    for axis = 2, #x.shape do features = features * x:dim(axis) end
    return x:reshape({x:dim(1), features})
  end)
end

return check.strict(nn, "nn")
