-- test_arity.lua - functions of the library refuse arguments that they would not look at.
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
          "net:load takes 1 argument (path), it was given 2")
  T.fails(function() net:freeze("nonsense", {1}) end,
          "net:freeze takes 1 argument (on), it was given 2")
  T.fails(function() net:freeze "nonsense" end, "net:freeze wants true or false, it is 'nonsense'")
  T.fails(function() net:freeze(0) end, "net:freeze wants true or false, it is 0")
  T.fails(function() net:train(false) end, "net:train takes no argument, it was given 1")
  T.fails(function() net:eval "x" end, "net:eval takes no argument, it was given 1")
  T.fails(function() net:parameters "w" end, "net:parameters takes no argument, it was given 1")
  T.fails(function() net:to("f64", "cpu") end, "net:to takes 1 argument (dtype), it was given 2")
  for _, p in ipairs(net:parameters()) do assert(p:sum():item() ~= nil) end
  net:freeze(true):freeze(false):freeze(nil):freeze(false)
  net:load(file, nil)                                  -- nil is as good as nothing
  os.remove(file)
end)

T.test("modules that are called", function()
  T.fails(function() nn.linear{2, 2}(x, x) end,
          "net linear{2, 2} takes 1 argument (x), it was given 2")
  T.fails(function() nn.relu()(x, 5) end, "net relu takes 1 argument (x), it was given 2")
  T.fails(function() net(x, x) end, "net.2 relu takes 1 argument (x), it was given 2")
  local own = nn.module({a = nn.linear{2, 2}}, function(self, a, b) return self.a(a) + b end, "own")
  T.equal(own(x, x, nil).shape, {2, 2})
  T.fails(function() own(x, x, x) end, "net own takes 2 arguments (a, b), it was given 3")
  local any = nn.module({}, function(_, ...) return select("#", ...) end)
  T.equal(any(x, x, x, nil), 4)
end)

T.test("makers", function()
  T.fails(function() nn.linear({2, 2}, {bias = false}) end,
          "nn.linear takes 1 argument (a table), it was given 2")
  T.fails(function() nn.linear(2, 2) end,
          "nn.linear wants one table: nn.linear{in, out; bias=true, init=uniform}, it is 2")
  T.fails(function() nn.sequential({lt.relu}, {lt.relu}) end,
          "nn.sequential takes 1 argument (layers), it was given 2")
  T.fails(function() nn.module({}, function() end, "a", "b") end,
          "nn.module takes 3 arguments (fields, forward, text), it was given 4")
  T.fails(function() optim.sgd(net, {lr = 0.1}, {momentum = 0.9}) end,
          "optim.sgd takes 2 arguments (what, options), it was given 3")
  T.fails(function() nn.module({}, function() end, {}) end,
          "nn.module: its text wants a string, it is a table")
  T.fails(function() optim.sgd({net[1].w, lr = 1}, {lr = 0.1}) end, "optim.sgd: the list of "
          .. "parameters has a key 'lr'; settings go into the table behind it")
  T.fails(function() optim.sgd({{params = net, 0.5}}, {lr = 0.1}) end,
          "optim.sgd: a group has settings by name, 1 is none")
  T.fails(function() lt.schedule.cosine({}, 5) end,
          "schedule.cosine takes 1 argument (a table), it was given 2")
  T.fails(function() lt.models.lenet({classes = 10}, 5) end,
          "models.lenet takes 1 argument (options), it was given 2")
  T.fails(function() lt.data.set({images = x, labels = x}, 5) end,
          "data.set takes 1 argument (a table), it was given 2")
  T.fails(function() lt.check("net{; classes=10}", 5) end,
          "lt.check takes 1 argument (text), it was given 2")
  T.fails(function() lt.check "net{; classes=10}"({classes = 5}, {classes = 5}) end,
          "the check of a maker takes 1 argument (a table), it was given 2")
  T.fails(function() nn.parameter({2}, {value = 1, low = 0, high = 1}) end,
          "nn.parameter: it starts with one of value, low and high, or mean and deviation")
  T.fails(function() nn.parameter({2}, {low = 0, mean = 1}) end,
          "nn.parameter: it starts with one of value, low and high, or mean and deviation")
  T.equal(nn.parameter({2}, {low = 0, high = 1}).shape, {2})
end)

T.test("optimizers, sets, runs and scalers", function()
  T.fails(function() sgd:step(0.1) end, "optim:step takes no argument, it was given 1")
  T.fails(function() sgd:zero_grad(true) end, "optim:zero_grad takes no argument, it was given 1")
  T.fails(function() set:batches({batch = 2}, 5) end,
          "set:batches takes 1 argument (a table), it was given 2")
  local scaler <close> = lt.amp.scaler{}
  T.fails(function() scaler:state(5) end, "scaler:state takes no argument, it was given 1")
  local all = nn.sequential{nn.flatten(), nn.linear{4, 2}}
  local o = {net = all, optim = optim.sgd(all, {lr = 0.1}), train = set, epochs = 1, batch = 2,
             out = os.tmpname() .. ".out"}
  T.fails(function() lt.run(o, {epochs = 2}) end,
          "lt.run takes 1 argument (a table), it was given 2")
  T.fails(function() lt.fit(o, {epochs = 2}) end,
          "lt.fit takes 1 argument (a table), it was given 2")
  do
    local run <close> = lt.run(o)
    T.fails(function() run:evaluate(set, {batch = 2}, "top5") end,
            "run:evaluate takes 2 arguments (set, a table), it was given 3")
    T.fails(function() run:save "here" end, "run:save takes no argument, it was given 1")
    T.fails(function() run:report({}, 5) end,
            "run:report takes 1 argument (numbers), it was given 2")
  end
  os.execute("rm -rf " .. o.out)
end)

T.test("tensors", function()
  local y = x:detach():requires_grad()
  T.fails(function() y:sum():backward(nil, {retain_graph = true}) end,
          "x:backward takes 1 argument (gradient), it was given 2")
  T.fails(function() x:requires_grad "no" end, "requires_grad wants true or false, it is 'no'")
  T.fails(function() x:detach(true) end, "x:detach takes no argument, it was given 1")
  T.fails(function() x:sum():item(1) end, "x:item takes no argument, it was given 1")
  T.fails(function() x:fill(1, 2) end, "x:fill takes 1 argument (value), it was given 2")
  T.fails(function() x:to("cpu", "f64") end, "x:to takes 1 argument (device), it was given 2")
  T.fails(function() x:dim(1, 2) end, "x:dim takes 1 argument (axis), it was given 2")
  T.fails(function() lt.zeros({2}, {dtype = "f64"}, 5) end,
          "lt.zeros takes 2 arguments (shape, options), it was given 3")
  T.fails(function() lt.tensor({2}, "f64") end,
          "lt.tensor: options are a table such as {dtype = 'f64'}, not 'f64'")
  T.fails(function() lt.arange(5, {dtype = "i64"}, 2) end,
          "lt.arange: nothing follows the options, it was given 2")
  T.fails(function() lt.arange(1, 5, 2, {dtype = "i64"}, 2) end,
          "lt.arange takes 4 arguments (first, stop, step, options), it was given 5")
end)

T.test("functions", function()
  T.fails(function() lt.load("x", {strict = false}) end,
          "lt.load takes 1 argument (path), it was given 2")
  T.fails(function() lt.save("x", net, {}, 5) end,
          "lt.save takes 3 arguments (path, what, meta), it was given 4")
  T.fails(function() lt.summary(net, {1, 2}, {depth = 2}) end,
          "lt.summary takes 2 arguments (net, shape), it was given 3")
  T.fails(function() lt.grad_check(lt.sum, {x}, {}, 5) end,
          "lt.grad_check takes 3 arguments (f, inputs, options), it was given 4")
  T.fails(function() lt.mixup(x, x, 0.5, 5) end,
          "lt.mixup takes 3 arguments (x, y, alpha), it was given 4")
  T.fails(function() lt.seed(1, 2) end, "lt.seed takes 1 argument (n), it was given 2")
  T.fails(function() lt.steps(1) end, "lt.steps takes no argument, it was given 1")
  T.fails(function() lt.help("relu", 1) end, "lt.help takes 1 argument (name), it was given 2")
  T.fails(function() lt.data.image("x.png", 3, 224) end,
          "data.image takes 2 arguments (path, channels), it was given 3")
  T.fails(function() lt.data.open("x", {size = 3}, 5) end,
          "data.open takes 2 arguments (what, a table), it was given 3")
  T.fails(function() lt.args({a = 1}, {b = 2}) end,
          "lt.args takes 1 argument (defaults), it was given 2")
  T.equal(select("#", lt.step(function(...) return ... end, 1, 2, nil, 4)), 4)
end)

T.finish()
