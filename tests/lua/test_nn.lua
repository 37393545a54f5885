-- test_nn.lua - modules: constructors, names in the tree, messages, modes, files.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local CONV2D = "nn.conv2d{in, out, kernel; stride=1, pad=0, dilation=1, groups=1, bias=true, "
               .. "init=uniform}"

local function names(net)
  local list = {}
  for name in net:named_parameters() do list[#list + 1] = name end
  return table.concat(list, " ")
end

T.test("names follow the tree", function()
  local net = nn.sequential{
    nn.conv2d{1, 2, 3}, nn.batch_norm{2}, lt.relu, nn.sequential{nn.linear{2, 3, bias = false}}}
  T.equal(names(net), "1.w 1.b 2.scale 2.shift 4.1.w")
  T.equal(names(net[4]), "1.w")
  local buffers = {}
  for name, tensor in net:named_buffers() do buffers[#buffers + 1] = name .. tensor.shape[1] end
  T.equal(buffers, {"2.mean2", "2.var2"})
  T.equal(net:count(), 2 * 9 + 2 + 4 + 6)
  T.equal(#net:parameters(), 5)
end)

T.test("named layers run in the order of creation", function()
  local net = nn.sequential{stem = nn.linear{2, 3}, act = nn.relu(), head = nn.linear{3, 1}}
  T.equal(names(net), "stem.w stem.b head.w head.b")
  T.equal(net(lt.ones({4, 2})).shape, {4, 1})
  net.more = nn.relu()
  T.fails(function() net:parameters() end,
          "sequential: layers cannot be added or removed after it is made")
end)

T.test("modules of the user", function()
  local block = nn.module({
    fc = nn.linear{2, 2}, gain = nn.parameter({2}, {value = 3})
  }, function(self, x)
    return lt.relu(self.fc(x)) * self.gain + x
  end)
  T.equal(names(block), "fc.w fc.b gain")
  T.equal(block(lt.ones({1, 2})).shape, {1, 2})
  T.equal(block.gain:totable(), {3.0, 3.0})
  local list = nn.module({layers = {nn.linear{2, 2}, nn.linear{2, 2}}}, function(self, x)
    for _, layer in ipairs(self.layers) do x = layer(x) end
    return x
  end, "stack")
  T.equal(names(list), "layers.1.w layers.1.b layers.2.w layers.2.b")
  T.equal(list(lt.ones({1, 2})).shape, {1, 2})
  T.equal(tostring(list), table.concat({
    "net: stack                12",
    "  layers.1: linear{2, 2}   6",
    "  layers.2: linear{2, 2}   6"}, "\n"))
end)

T.test("the layers run", function()
  local x = lt.randn({2, 6, 6, 4})
  local function shape(layer) return nn.sequential{layer}(x).shape end
  T.equal(shape(nn.conv2d{4, 8, {3, 5}, stride = {1, 2}, pad = {1, 2}, bias = false}), {2, 6, 3, 8})
  T.equal(shape(nn.conv2d{4, 4, 3, groups = 4, dilation = 2}), {2, 2, 2, 4})
  T.equal(shape(nn.max_pool2d{2}), {2, 3, 3, 4})
  T.equal(shape(nn.avg_pool2d{3, stride = 1, pad = 1}), {2, 6, 6, 4})
  T.equal(shape(nn.global_avg_pool2d()), {2, 4})
  T.equal(shape(nn.flatten()), {2, 144})
  T.equal(shape(nn.layer_norm{4}), {2, 6, 6, 4})
  T.equal(shape(nn.group_norm{2, 4}), {2, 6, 6, 4})
  T.equal(shape(nn.batch_norm{4}), {2, 6, 6, 4})
  T.equal(shape(nn.residual{nn.conv2d{4, 4, 3, pad = 1}}), {2, 6, 6, 4})
  T.equal(shape(nn.residual{nn.conv2d{4, 2, 3, pad = 1}, skip = nn.conv2d{4, 2, 1}}), {2, 6, 6, 2})
  local positive = x:abs() + 0.1
  for name in pairs(nn) do
    local is_op, text = pcall(lt.help, name)
    if is_op and text:find("^" .. name .. "%(x%)\n") then
      T.equal(nn[name]()(positive):totable(), lt[name](positive):totable())
    end
  end
  T.equal(nn.embedding{10, 3}(lt.tensor({1, 9}, {dtype = "i64"})).shape, {2, 3})
  T.equal(names(nn.residual{nn.linear{1, 1}, skip = nn.linear{1, 1}}),
          "body.w body.b skip.w skip.b")
end)

T.test("initial values", function()
  local net = nn.sequential{nn.linear{100, 200}, nn.batch_norm{3}, nn.embedding{50, 20}}
  net:parameters()
  local most = lt.abs(net[1].w):max():item()
  assert(most <= 0.1 and most > 0.099, most)
  T.near(net[3].w:mean():item(), 0, 0.1)
  T.equal(net[2].scale:totable(), {1.0, 1.0, 1.0})
  T.equal(net[2].shift:totable(), {0.0, 0.0, 0.0})
  T.equal(net[2].var:totable(), {1.0, 1.0, 1.0})
  assert(net[1].w.on_tape and not net[2].mean.on_tape)
  T.equal(nn.sequential{nn.batch_norm{2, scale = 0}}[1].scale.shape, {2})
  T.equal(lt.relu(nn.batch_norm{2, scale = 0}(lt.randn({4, 2}))):totable(),
          lt.zeros({4, 2}):totable())
end)

T.test("initialisers", function()
  local function deviation(layer)                -- of weights around 0
    local w = nn.sequential{layer}:parameters()[1]
    local square = (w * w):mean():item()
    T.near(w:mean():item(), 0, 0.1 * square ^ 0.5)
    if layer.b then T.equal(layer.b:totable(), lt.zeros({layer.out}):totable()) end
    return square ^ 0.5
  end
  local function near(got, wanted) T.near(got, wanted, 0.05 * wanted) end
  near(deviation(nn.conv2d{32, 64, 3, init = "he"}), math.sqrt(2 / (9 * 64)))
  near(deviation(nn.conv2d{64, 32, {3, 5}, init = "he"}), math.sqrt(2 / (15 * 32)))
  near(deviation(nn.conv2d{512, 1024, 3, groups = 512, init = "he"}), math.sqrt(2 / (9 * 2)))
  near(deviation(nn.linear{100, 400, init = "he"}), math.sqrt(2 / 400))
  near(deviation(nn.linear{100, 400, init = 0.01, bias = false}), 0.01)
  near(deviation(nn.conv2d{32, 64, 3, init = 0.5}), 0.5)
  local uniform = nn.linear{100, 50, init = "uniform"}
  uniform:parameters()
  T.near(lt.abs(uniform.b):max():item(), 0.1, 0.01)
  T.equal(tostring(nn.linear{1, 2, init = "he"}), "net: linear{1, 2}  4")
  T.fails(function() nn.linear{1, 2, init = "xavier"} end, "nn.linear: 'init' must be 'uniform', "
          .. "'he' or a standard deviation, but is 'xavier'")
  T.fails(function() nn.linear{1, 2, init = -1} end, "nn.linear: 'init' must be 'uniform', "
          .. "'he' or a standard deviation, but is -1")
end)

T.test("tostring", function()
  local shared = nn.linear{4, 4}
  local net = nn.sequential{
    nn.conv2d{1, 2, 3, pad = {1, 0}}, lt.relu, nn.max_pool2d{2, stride = 1}, nn.flatten(),
    nn.residual{nn.sequential{shared, nn.dropout{0.25}, shared}}, nn.dropout(),
    nn.batch_norm{2, eps = 1e-3}}
  T.equal(tostring(net), table.concat({
    "net: sequential                         44",
    "  1: conv2d{1, 2, 3, pad = {1, 0}}      20",
    "  2: relu",
    "  3: max_pool2d{2, stride = 1}",
    "  4: flatten",
    "  5: residual                           20",
    "    body: sequential                    20",
    "      1: linear{4, 4}                   20",
    "      2: dropout{0.25}",
    "      3: linear{4, 4}               shared",
    "  6: dropout",
    "  7: batch_norm{2, eps = 0.001}          4"}, "\n"))
  T.equal(tostring(nn.sequential{name = "tiny", nn.linear{1000, 2000}}),
          "tiny: sequential         2,002,000\n  1: linear{1000, 2000}  2,002,000")
end)

T.test("constructors are strict", function()
  T.fails(function() nn.conv2d{3, 64, 3, strides = 2} end,
          "nn.conv2d: unknown key 'strides' (did you mean 'stride'?)")
  T.fails(function() nn.conv2d{3, 64} end, "nn.conv2d: 'kernel' is missing: "
          .. CONV2D)
  T.fails(function() nn.conv2d{3, 64, 3, 2} end, "nn.conv2d accepts 3 values by position: "
          .. CONV2D)
  T.fails(function() nn.conv2d{3, 64, "3"} end,
          "nn.conv2d: 'kernel' must be a non-negative integer, or two (height, width), but is '3'")
  T.fails(function() nn.conv2d{3, 64, 3, groups = 2} end,
          "nn.conv2d: 'groups' must divide 'in' and 'out', but they are 2, 3 and 64")
  T.fails(function() nn.group_norm{4, 6} end,
          "nn.group_norm: 'groups' must divide 'channels', but they are 4 and 6")
  T.fails(function() nn.linear{0, 3} end, "nn.linear: 'in' must be a positive integer, but is 0")
  T.fails(function() nn.linear{2, 3, out = 3} end, "nn.linear: 'out' is given twice")
  T.fails(function() nn.linear(2, 3) end,
          "nn.linear requires one table: nn.linear{in, out; bias=true, init=uniform}, but got 2")
  T.fails(function() nn.linear{2, 3, bias = 1} end,
          "nn.linear: 'bias' must be true or false, but is 1")
  T.fails(function() return nn.conv3d end, "nn has no 'conv3d' (did you mean 'conv2d'?)")
  T.fails(function() nn.sequential{nn.linear{1, 1}, nn.relu} end,
          "nn.sequential: layer 2 is the constructor nn.relu; write nn.relu{...}")
  T.fails(function() nn.sequential{nn.linear{1, 1}, 5} end,
          "nn.sequential: layer 2 must be a module or a function, but is a number")
  T.fails(function() nn.sequential{nn.linear{1, 1}, nil, lt.relu} end,
          "nn.sequential: layer 2 is nil")
  T.fails(function() nn.sequential{nn.linear{1, 1}, head = nn.relu()} end,
          "nn.sequential: layers must have numbers or names, not both")
  T.fails(function() nn.sequential{act = lt.relu} end, "nn.sequential: layer 'act' is a function, "
          .. "which has no order among named layers; use a module, or number the layers")
  T.fails(function() nn.sequential{train = nn.relu()} end,
          "nn: 'train' is a method of modules; give the field another name")
  T.fails(function() nn.residual{5} end,
          "nn.residual: 'body' must be a module or a function, but is 5")
  T.fails(function() nn.module(5) end, "nn.module requires a table of fields and a function: "
          .. "nn.module({conv = nn.conv2d{...}}, function(self, x) ... end)")
end)

T.test("lt.check checks options of the user's constructors", function()
  local spec = lt.check("net{depth; classes:count=10, width:amount=1.0, at?:epochs, "
                        .. "like:count=depth}")
  T.equal((spec{3, width = 0}), {depth = 3, classes = 10, width = 0, like = 3})
  local given, text = spec{depth = 3, at = {1, 2.5}}
  T.equal(given.at, {1, 2.5})
  T.equal(text, "net{3, at = {1, 2.5}}")
  T.fails(function() spec{3, width = -1} end,
          "net: 'width' must be a non-negative number, but is -1")
  T.fails(function() spec{3, with = 1} end, "net: unknown key 'with' (did you mean 'width'?)")
  T.fails(function() lt.check "net" end,
          "lt.check requires a text like 'net{in, out; bias=true}', but got 'net'")
  T.fails(function() lt.check() end,
          "lt.check requires a text like 'net{in, out; bias=true}', but got nil")
  for _, piece in ipairs{"width:float=1.0", "a b", "=3"} do
    T.fails(function() lt.check("net{depth; " .. piece .. "}") end,
            "lt.check: net: cannot read '" .. piece
            .. "'; write 'name:kind=default', with a known kind")
  end
end)

T.test("messages name the module and the user's line", function()
  local net = nn.sequential{nn.linear{2, 3}, nn.relu(), nn.sequential{nn.linear{4, 1}}}
  assert(nn.sequential{name = nn.linear{1, 1}}:parameters()[1])
  T.fails(function() net(lt.ones({5, 2})) end,
          "net.3.1 linear: w has 4 input features, but x has 3 (x 5x3 f32, w 1x4 f32)")
  local named = nn.sequential{name = "critic", nn.linear{2, 3}}
  T.fails(function() named(lt.ones({5, 1})) end,
          "critic.1 linear: w has 2 input features, but x has 1 (x 5x1 f32, w 3x2 f32)")
  T.fails(function()
    local own = nn.module({w = nn.parameter({2})}, function(self, x)
      return x + self.w
    end)
    own(lt.ones({3}))
  end, "net add: x is 3 f32 and y is 2 f32, which do not broadcast: "
       .. "axis 1 from the end has 3 and 2")
  T.fails(function() net(lt.ones({5, 2})) end,      -- an error leaves no state behind
          "net.3.1 linear: w has 4 input features, but x has 3 (x 5x3 f32, w 1x4 f32)")
  T.fails(function() lt.ones({3}):add(lt.ones({2})) end,
          "add: x is 3 f32 and y is 2 f32, which do not broadcast: axis 1 from the end has 3 and 2")
end)

T.test("a module that is not a field of its caller is an error", function()
  local hidden = nn.linear{2, 2}
  local net = nn.module({}, function(_, x) return hidden(x) end)
  T.fails(function() net(lt.ones({1, 2})) end,
          "net linear{2, 2} is called but is not a field of its caller, "
          .. "so it would not be trained or saved")
end)

T.test("the tree of modules may grow and change", function()
  local net = nn.sequential{nn.linear{2, 2}, nn.linear{2, 3}}
  local x = lt.ones({1, 2})
  net(x)
  local first = net[1].w:totable()
  net[2] = nn.linear{2, 5}
  T.equal(net(x).shape, {1, 5})
  T.equal(net[1].w:totable(), first)
  net[3] = lt.relu
  net[4] = nn.linear{5, 1}
  T.equal(names(net), "1.w 1.b 2.w 2.b 4.w 4.b")
  T.equal(net(x).shape, {1, 1})
  local body = nn.sequential{nn.linear{2, 2}}
  body(x)
  local whole = nn.sequential{body, nn.linear{2, 1}}
  T.equal(whole(x).shape, {1, 1})
  T.equal(names(whole), "1.1.w 1.1.b 2.w 2.b")
  local outer = nn.sequential{nn.module({}, function(self, y)
    return self.late and self.late(y) or y
  end)}
  outer(x)
  outer[1].late = nn.linear{2, 1}                  -- linked to its owner by the first call
  T.equal(outer(x).shape, {1, 1})
  T.equal(names(outer), "1.late.w 1.late.b")
  local taken = nn.linear{2, 1}
  local former = nn.sequential{taken}
  former[1] = lt.relu
  T.equal(taken(x).shape, {1, 1})
  local loop = nn.module({}, function(_, y) return y end)
  loop.self = loop
  T.fails(function() loop:parameters() end, "nn: module contains itself")
end)

T.test("the first use of one module allocates the parameters of the whole tree", function()
  local net = nn.sequential{nn.linear{2, 2}, nn.linear{2, 3}}
  net[2](lt.ones({1, 2}))
  T.equal(net[1].w.shape, {2, 2})
  T.equal(#net[1].w:totable(), 2)
end)

T.test("the parameters of a shared module count once", function()
  local part = nn.linear{3, 3}
  local net = nn.sequential{part, lt.relu, part}
  T.equal(names(net), "1.w 1.b")
  T.equal(net:count(), 12)
  net(lt.ones({2, 3})):sum():backward()
  T.equal(part.w.grad.shape, {3, 3})
end)

T.test("train and eval", function()
  local net = nn.sequential{nn.dropout{0.5}, nn.sequential{nn.batch_norm{2}}}
  assert(net.training and net[2][1].training)
  net:eval()
  assert(not net.training and not net[2][1].training)
  net:train()
  assert(net[2][1].training)
  local x = lt.ones({64, 2})
  assert(nn.dropout{0.5}(x):eq(0):sum():item() > 0)
  T.equal(nn.sequential{nn.dropout{0.5}}:eval()(x):eq(0):sum():item(), 0)
end)

T.test("batch norm's running statistics change when they are committed", function()
  local net = nn.sequential{nn.batch_norm{1, momentum = 0.5}}
  local x = lt.tensor({{1}, {3}})
  net(x)
  T.equal(net[1].mean:item(), 0.0)
  net:eval()
  T.near(net[1].mean:item(), 1)
  T.near(net[1].var:item(), 0.5 + 0.5 * 2)
end)

T.test("freezing", function()
  local net = nn.sequential{nn.linear{2, 2}, nn.linear{2, 1}}
  net[1]:freeze()
  net(lt.ones({1, 2})):sum():backward()
  assert(net[1].w.grad == nil and net[2].w.grad ~= nil)
  net:zero_grad()
  net:freeze(false)
  net(lt.ones({1, 2})):sum():backward()
  assert(net[1].w.grad ~= nil)
end)

-- Checks that net and the function `plain` give the same outputs and gradients for the same input,
-- in f64.
local function compare(net, plain, shape)
  local x, results = lt.randn(shape, {dtype = "f64"}):requires_grad(), {}
  for i, f in ipairs{net, plain} do
    net:zero_grad()
    x:zero_grad()
    local y = f(x)
    lt.sum(y * lt.arange(y:count(), {dtype = "f64"}):reshape(y.shape)):backward()
    results[i] = {y, x.grad * 1}
    for _, p in ipairs(net:parameters()) do table.insert(results[i], p.grad * 1) end
  end
  for i, got in ipairs(results[1]) do
    T.near(lt.max(lt.abs(got - results[2][i])):item(), 0, 1e-9)
  end
end

-- The ops and modules of the rows in a net's summary.
local function rows(net, shape)
  local list = {}
  for line in lt.summary(net, shape):gmatch "[^\n]+" do
    list[#list + 1] = line:match "^  (.-)  "
  end
  return table.concat(list, "; ")
end

T.test("a sequential fuses a norm with the activation after it", function()
  for _, act in ipairs{"relu", "relu6"} do
    for _, layer in ipairs{lt[act], nn[act]()} do
      local net = nn.sequential{nn.batch_norm{3}, layer, nn.linear{3, 2}}:to "f64"
      compare(net, function(x) return net[3](lt[act](net[1](x))) end, {4, 3})
      T.equal(rows(net, {4, 3}), "1: batch_norm{3}; 3: linear{3, 2}")
    end
  end
  local named = nn.sequential{norm = nn.batch_norm{3}, act = nn.relu()}:to "f64"
  compare(named, function(x) return lt.relu(named.norm(x)) end, {4, 3})
  T.equal(rows(named, {4, 3}), "norm: batch_norm{3}")
  local sync = nn.sequential{nn.sync_batch_norm{3}, lt.relu}:to "f64"
  compare(sync, function(x) return lt.relu(sync[1](x)) end, {4, 3})
  T.equal(rows(sync, {4, 3}), "1: sync_batch_norm{3}")
  local inner = nn.sequential{nn.sequential{nn.linear{3, 3}, nn.batch_norm{3}}, lt.relu}:to "f64"
  compare(inner, function(x) return lt.relu(inner[1][2](inner[1][1](x))) end, {4, 3})
  assert(not rows(inner, {4, 3}):find "relu")
  local twice = nn.sequential{nn.batch_norm{3, act = "relu6"}, lt.relu}:to "f64"
  compare(twice, function(x) return lt.relu(lt.relu6(twice[1](x) * 1)) end, {4, 3})
  T.equal(rows(twice, {4, 3}), "1: batch_norm{3, act = relu6}; relu")
end)

T.test("the norm at the end of a residual's body adds the skip connection", function()
  local net = nn.sequential{
    nn.residual{body = nn.sequential{nn.linear{3, 3}, nn.batch_norm{3}}}, lt.relu}:to "f64"
  local body = net[1].body
  compare(net, function(x) return lt.relu(body[2](body[1](x)) + x) end, {5, 3})
  assert(not rows(net, {5, 3}):find "add" and not rows(net, {5, 3}):find "relu")
  local skip = nn.residual{body = nn.batch_norm{3}, skip = nn.linear{3, 3}}:to "f64"
  compare(skip, function(x) return skip.body(x) + skip.skip(x) end, {5, 3})
  local other = nn.sequential{nn.residual{body = nn.linear{3, 3}}, lt.relu}:to "f64"
  compare(other, function(x) return lt.relu(other[1].body(x) + x) end, {5, 3})
  local nested = nn.residual{body = nn.residual{body = nn.batch_norm{3}}}:to "f64"
  compare(nested, function(x) return nested.body.body(x) + x + x end, {5, 3})
  local spread = nn.sequential{nn.residual{body = nn.batch_norm{3}, skip = nn.linear{3, 1}},
                               lt.relu}:to "f64"
  local part = spread[1]
  compare(spread, function(x) return lt.relu(part.body(x) + part.skip(x)) end, {5, 3})
  compare(part, function(x) return part.body(x) + part.skip(x) end, {5, 3})
  local own = nn.module({norm = nn.batch_norm{3}}, function(self, x)
    return self.norm(x, 2 * x)
  end):to "f64"
  compare(own, function(x) return own.norm(x) + 2 * x end, {5, 3})
end)

T.test("a sequential runs max pooling before the activation", function()
  for _, layer in ipairs{lt.relu, nn.relu6()} do
    local net = nn.sequential{layer, nn.max_pool2d{3, stride = 2, pad = 1}}
    compare(net, function(x) return net[2](layer(x)) end, {2, 7, 6, 3})
    assert(rows(net, {2, 7, 6, 3}):find "max_pool2d.*relu")
  end
end)

T.test("dtype", function()
  local net = nn.sequential{nn.linear{2, 2}, nn.batch_norm{2}}:to("f64")
  T.equal(net(lt.ones({2, 2}, {dtype = "f64"})).dtype, "f64")
  T.equal(net[2].mean.dtype, "f64")
  T.fails(function() net:to("f32") end,
          "a parameter's dtype cannot change once it has memory (it is f64); "
          .. "set it before the first use")
  T.fails(function() net:to("f33") end, "to: unknown dtype 'f33' (did you mean 'f32'?)")
end)

T.test("saving and loading", function()
  local path = os.tmpname()
  local function make(out)
    return nn.sequential{nn.linear{2, 3}, nn.batch_norm{3}, nn.linear{3, out}}
  end
  local a, b = make(2), make(2)
  assert(a:sha256() ~= b:sha256(), "two nets start from different values")
  lt.save(path, a, {epoch = 3, note = "x"})
  T.equal(b:load(path):sha256(), a:sha256())
  local tensors, meta = lt.load(path)
  T.equal(meta, {epoch = "3", note = "x"})
  T.equal(tensors["1.w"]:totable(), a[1].w:totable())
  T.equal(tensors["2.var"].shape, {3})
  T.fails(function() make(4):load(path) end,
          path .. " does not fit: 3.w is 2x3, but the net has 4x3; "
          .. "3.b is 2, but the net has 4")
  local other = nn.sequential{nn.linear{2, 3}, nn.relu(), nn.relu(), nn.linear{3, 2}}
  T.fails(function() other:load(path) end, path .. " does not fit: 4.w is missing; 4.b is missing; "
          .. "2.scale is not in the net; 2.shift is not in the net; 2.mean is not in the net; "
          .. "2.var is not in the net; 3.w is not in the net; 3.b is not in the net")
  lt.save(path, {b = lt.ones({2}), a = lt.tensor(1)})
  T.equal(lt.load(path).b:totable(), {1.0, 1.0})
  T.fails(function() lt.save(path, {lt.ones({2})}) end,
          "lt.save: a table must map names to tensors, but 1 is a userdata")
  T.fails(function() lt.save(path, {x = {}}) end,
          "lt.save: a table must map names to tensors, but x is a table")
  T.fails(function() lt.save(path, 5) end, "lt.save requires a table of tensors or a net")
  os.remove(path)
  T.raises(path, lt.load, path)
end)

T.test("a shared tensor loads from any of its names", function()
  local path = os.tmpname()
  local part = nn.linear{2, 2}
  local net = nn.sequential{part, part}
  local w = lt.ones({2, 2})
  lt.save(path, {["2.w"] = w, ["2.b"] = lt.zeros({2})})
  net:load(path)
  T.equal(part.w:totable(), w:totable())
  os.remove(path)
end)

T.test("a list that contains itself", function()
  local list = {w = nn.parameter({1})}
  list.again = list
  local net = nn.module({list = list}, function() end)
  T.fails(function() net:parameters() end, "nn: a list in module contains itself")
end)

T.finish()
