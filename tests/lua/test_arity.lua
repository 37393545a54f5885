-- test_arity.lua - functions of the library reject extra arguments.
local lt = require "luatrain"
local nn, optim = lt.nn, lt.optim
local T = require "lt_test"

local net = nn.sequential{nn.linear{2, 2}, nn.relu()}
local sgd = optim.sgd(net, {lr = 0.1})
local x = lt.ones({2, 2})
local set = lt.data.set{images = lt.ones({4, 2, 2, 1}), labels = lt.zeros({4}, {dtype = "i64"})}

local function path()
  local name = os.tmpname()
  lt.save(name, net)
  return name
end

T.test("methods of nets", function()
  local file = path()
  T.fails(function() net:load(file, {strict = false}) end,
          "net:load accepts 1 argument (path), got 2")
  T.fails(function() net:freeze("nonsense", {1}) end,
          "net:freeze accepts 1 argument (on), got 2")
  T.fails(function() net:freeze "nonsense" end,
          "net:freeze requires true or false, but got 'nonsense'")
  T.fails(function() net:freeze(0) end, "net:freeze requires true or false, but got 0")
  T.fails(function() net:train(false) end, "net:train accepts no arguments, got 1")
  T.fails(function() net:eval "x" end, "net:eval accepts no arguments, got 1")
  T.fails(function() net:parameters "w" end, "net:parameters accepts no arguments, got 1")
  T.fails(function() net:to("f64", "cpu") end, "net:to accepts 1 argument (dtype), got 2")
  for _, p in ipairs(net:parameters()) do assert(p:sum():item() ~= nil) end
  net:freeze(true):freeze(false):freeze(nil):freeze(false)
  net:load(file, nil)                                  -- nil counts as no argument
  os.remove(file)
end)

T.test("calls of modules", function()
  T.fails(function() nn.linear{2, 2}(x, x) end,
          "net linear{2, 2} accepts 1 argument (x), got 2")
  T.fails(function() nn.relu()(x, 5) end, "net relu accepts 1 argument (x), got 2")
  T.fails(function() net(x, x) end, "net.2 relu accepts 1 argument (x), got 2")
  local own = nn.module({a = nn.linear{2, 2}}, function(self, a, b) return self.a(a) + b end, "own")
  T.equal(own(x, x, nil).shape, {2, 2})
  T.fails(function() own(x, x, x) end, "net own accepts 2 arguments (a, b), got 3")
  local any = nn.module({}, function(_, ...) return select("#", ...) end)
  T.equal(any(x, x, x, nil), 4)
end)

T.test("constructors", function()
  T.fails(function() nn.linear({2, 2}, {bias = false}) end,
          "nn.linear accepts 1 argument (a table), got 2")
  T.fails(function() nn.linear(2, 2) end,
          "nn.linear requires one table: nn.linear{in, out; bias=true, init=uniform}, but got 2")
  T.fails(function() nn.sequential({lt.relu}, {lt.relu}) end,
          "nn.sequential accepts 1 argument (layers), got 2")
  T.fails(function() nn.module({}, function() end, "a", "b") end,
          "nn.module accepts 3 arguments (fields, forward, text), got 4")
  T.fails(function() optim.sgd(net, {lr = 0.1}, {momentum = 0.9}) end,
          "optim.sgd accepts 2 arguments (what, options), got 3")
  T.fails(function() nn.module({}, function() end, {}) end,
          "nn.module: text must be a string, but is a table")
  T.fails(function() optim.sgd({net[1].w, lr = 1}, {lr = 0.1}) end, "optim.sgd: the list of "
          .. "parameters has a key 'lr'; settings go into the next table")
  T.fails(function() optim.sgd({{params = net, 0.5}}, {lr = 0.1}) end,
          "optim.sgd: the settings of a group must have names, but got 1")
  T.fails(function() lt.schedule.cosine({}, 5) end,
          "schedule.cosine accepts 1 argument (a table), got 2")
  T.fails(function() lt.models.lenet({classes = 10}, 5) end,
          "models.lenet accepts 1 argument (options), got 2")
  T.fails(function() lt.data.set({images = x, labels = x}, 5) end,
          "data.set accepts 1 argument (a table), got 2")
  T.fails(function() lt.check("net{; classes=10}", 5) end,
          "lt.check accepts 1 argument (text), got 2")
  T.fails(function() lt.check "net{; classes=10}"({classes = 5}, {classes = 5}) end,
          "the check of a constructor accepts 1 argument (a table), got 2")
  T.fails(function() nn.parameter({2}, {value = 1, low = 0, high = 1}) end,
          "nn.parameter: give only one of value, low and high, or mean and deviation")
  T.fails(function() nn.parameter({2}, {low = 0, mean = 1}) end,
          "nn.parameter: give only one of value, low and high, or mean and deviation")
  T.equal(nn.parameter({2}, {low = 0, high = 1}).shape, {2})
end)

T.test("optimizers, sets, runs and scalers", function()
  T.fails(function() sgd:step(0.1) end, "optim:step accepts no arguments, got 1")
  T.fails(function() sgd:zero_grad(true) end, "optim:zero_grad accepts no arguments, got 1")
  T.fails(function() set:batches({batch = 2}, 5) end,
          "set:batches accepts 1 argument (a table), got 2")
  local scaler <close> = lt.amp.scaler{}
  T.fails(function() scaler:state(5) end, "scaler:state accepts no arguments, got 1")
  local all = nn.sequential{nn.flatten(), nn.linear{4, 2}}
  local o = {net = all, optim = optim.sgd(all, {lr = 0.1}), train = set, epochs = 1, batch = 2,
             out = os.tmpname() .. ".out"}
  T.fails(function() lt.run(o, {epochs = 2}) end,
          "lt.run accepts 1 argument (a table), got 2")
  T.fails(function() lt.fit(o, {epochs = 2}) end,
          "lt.fit accepts 1 argument (a table), got 2")
  do
    local run <close> = lt.run(o)
    T.fails(function() run:evaluate(set, {batch = 2}, "top5") end,
            "run:evaluate accepts 2 arguments (set, a table), got 3")
    T.fails(function() run:save "here" end, "run:save accepts no arguments, got 1")
    T.fails(function() run:report({}, 5) end,
            "run:report accepts 1 argument (numbers), got 2")
  end
  os.execute("rm -rf " .. o.out)
end)

T.test("tensors", function()
  local y = x:detach():requires_grad()
  T.fails(function() y:sum():backward(nil, {retain_graph = true}) end,
          "x:backward accepts 1 argument (gradient), got 2")
  T.fails(function() x:requires_grad "no" end, "requires_grad requires true or false, but got 'no'")
  T.fails(function() x:detach(true) end, "x:detach accepts no arguments, got 1")
  T.fails(function() x:sum():item(1) end, "x:item accepts no arguments, got 1")
  T.fails(function() x:fill(1, 2) end, "x:fill accepts 1 argument (value), got 2")
  T.fails(function() x:to("cpu", "f64") end, "x:to accepts 1 argument (device), got 2")
  T.fails(function() x:dim(1, 2) end, "x:dim accepts 1 argument (axis), got 2")
  T.fails(function() lt.zeros({2}, {dtype = "f64"}, 5) end,
          "lt.zeros accepts 2 arguments (shape, options), got 3")
  T.fails(function() lt.tensor({2}, "f64") end,
          "lt.tensor: options must be a table such as {dtype = 'f64'}, but got 'f64'")
  T.fails(function() lt.arange(5, {dtype = "i64"}, 2) end,
          "lt.arange accepts no arguments after the options, got 2")
  T.fails(function() lt.arange(1, 5, 2, {dtype = "i64"}, 2) end,
          "lt.arange accepts 4 arguments (first, stop, step, options), got 5")
end)

T.test("functions", function()
  T.fails(function() lt.load("x", {strict = false}) end,
          "lt.load accepts 1 argument (path), got 2")
  T.fails(function() lt.save("x", net, {}, 5) end,
          "lt.save accepts 3 arguments (path, what, meta), got 4")
  T.fails(function() lt.summary(net, {1, 2}, {depth = 2}) end,
          "lt.summary accepts 2 arguments (net, shape), got 3")
  T.fails(function() lt.grad_check(lt.sum, {x}, {}, 5) end,
          "lt.grad_check accepts 3 arguments (f, inputs, options), got 4")
  T.fails(function() lt.mixup(x, x, 0.5, 5) end,
          "lt.mixup accepts 3 arguments (x, y, alpha), got 4")
  T.fails(function() lt.seed(1, 2) end, "lt.seed accepts 1 argument (n), got 2")
  T.fails(function() lt.steps(1) end, "lt.steps accepts no arguments, got 1")
  T.fails(function() lt.help("relu", 1) end, "lt.help accepts 1 argument (name), got 2")
  T.fails(function() lt.data.image("x.png", 3, 224) end,
          "data.image accepts 2 arguments (path, channels), got 3")
  T.fails(function() lt.data.open("x", {size = 3}, 5) end,
          "data.open accepts 2 arguments (what, a table), got 3")
  T.fails(function() lt.args({a = 1}, {b = 2}) end,
          "lt.args accepts 1 argument (defaults), got 2")
  T.equal(select("#", lt.step(function(...) return ... end, 1, 2, nil, 4)), 4)
end)

T.finish()
