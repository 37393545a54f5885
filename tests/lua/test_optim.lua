-- test_optim.lua - optimizers: arithmetic, groups, settings, state and invalid calls.
local lt = require "luatrain"
local nn, optim = lt.nn, lt.optim
local T = require "lt_test"

local USAGE = "optim.sgd(net, {lr, momentum=0.0, nesterov=false, weight_decay=0.0, "
              .. "decay_bias=true, "
              .. "clip=0.0, lr_factor=1.0})"

-- A net of one number, w = 1, with gradient 2.
local function one()
  return nn.module({w = nn.parameter({1}, {value = 1})}, function(self)
    return (self.w * 2):sum()
  end)
end

-- w after n steps.
local function after(n, make, options)
  local net = one()
  local o = make(net, options)
  for _ = 1, n do
    net():backward()
    assert(o:step() == "applied")
  end
  return net.w:item()
end

T.test("sgd", function()
  T.near(after(2, optim.sgd, {lr = 0.1}), 1 - 0.2 - 0.2)
  T.near(after(1, optim.sgd, {lr = 0.1, weight_decay = 0.5}), 1 - 0.1 * 2.5)
  T.near(after(2, optim.sgd, {lr = 0.1, momentum = 0.5}), 1 - 0.1 * 2 - 0.1 * 3)
  T.near(after(1, optim.sgd, {lr = 0.1, momentum = 0.5, nesterov = true}), 1 - 0.1 * 3)
end)

T.test("adam", function()
  T.near(after(1, optim.adam, {lr = 0.1}), 0.9)
  T.near(after(3, optim.adam, {lr = 0.1}), 0.7, 1e-5)
  T.near(after(1, optim.adamw, {lr = 0.1, weight_decay = 0.5}), 1 - 0.1 * 0.5 - 0.1)
end)

-- A net of two 2 x 2 matrices, adjacent in their arena, and a bias. The values are 3, 1 and 1, the
-- gradients 4, 1 and 2.
local function two()
  return nn.module({
    a = nn.parameter({2, 2}, {value = 3}), b = nn.parameter({2, 2}, {value = 1}),
    c = nn.parameter({1}, {value = 1}),
  }, function(self)
    return (self.a * 4):sum() + self.b:sum() + (self.c * 2):sum()
  end)
end

T.test("lars: each matrix has its own trust ratio, and a bias has none", function()
  local net = two()
  local o = optim.lars(net, {lr = 0.5, momentum = 0.5, weight_decay = 0.25, trust = 0.1})
  local qa, qb = 0.1 * 6 / (8 + 0.25 * 6), 0.1 * 2 / (2 + 0.25 * 2)    -- norms are 6, 8; 2, 2
  local va, vb = qa * (4 + 0.25 * 3), qb * (1 + 0.25)
  net():backward()
  o:step()
  T.near(net.a:totable()[1][1], 3 - 0.5 * va, 1e-6)
  T.near(net.b:totable()[2][2], 1 - 0.5 * vb, 1e-6)
  T.near(net.c:item(), 1 - 0.5 * 2, 1e-6)
  local a = 3 - 0.5 * va
  o.lr = 0.1                                           -- v does not contain lr
  va = 0.5 * va + 0.1 * 2 * a / (8 + 0.25 * 2 * a) * (4 + 0.25 * a)
  net():backward()
  o:step()
  T.near(net.a:totable()[2][1], a - 0.1 * va, 1e-6)
  T.near(net.c:item(), 0 - 0.1 * (0.5 * 2 + 2), 1e-6)
  o.decay_bias = true
  net():backward()
  o:step()
  T.near(net.c:item(), -0.3 - 0.1 * (0.5 * 3 + 2 + 0.25 * -0.3), 1e-6)
end)

T.test("lars without a trust ratio is bit-identical to sgd", function()
  local start = lt.randn{257}
  local function run(make, options)
    local net = nn.module({w = nn.parameter({257})}, function(self)
      return (self.w * self.w):sum()
    end)
    net:parameters()
    net.w:copy(start)
    local o = make(net, options)
    for _ = 1, 3 do
      net():backward()
      o:step()
    end
    return net:sha256()
  end
  T.equal(run(optim.lars, {lr = 0.1, weight_decay = 0.01, decay_bias = true, clip = 1}),
          run(optim.sgd, {lr = 0.1, momentum = 0.9, weight_decay = 0.01, clip = 1}))
end)

T.test("settings may change between steps", function()
  local net = one()
  local o = optim.sgd(net, {lr = 0.1})
  net():backward()
  o.lr = 0.5
  o:step()
  T.near(net.w:item(), 0)
  T.fails(function() o.Lr = 0.1 end, "optim.sgd: unknown key 'Lr' (did you mean 'lr'?)")
  T.fails(function() o.decay = 0.1 end,
          "optim.sgd: unknown key 'decay' (did you mean 'weight_decay'?)")
  o.lr = "fast"
  net():backward()
  T.fails(function() o:step() end, "optim.sgd: 'lr' must be a non-negative number, but is 'fast'")
  o.lr, o.momentum = 0.1, 0.9
  T.fails(function() o:step() end,
          "optim.sgd: this optimizer was made without momentum; make a new one to use it")
end)

T.test("parameters without memory", function()
  local layer = nn.linear{2, 1}
  T.fails(function() optim.sgd({layer.w}, {lr = 0.1}) end,
          "optim.sgd: item 1 of the list has no memory yet; give the module instead of its "
          .. "parameters, or call or load the net first")
  optim.sgd(layer, {lr = 0.1})
  optim.sgd({layer.w}, {lr = 0.1})
end)

T.test("groups", function()
  local a, b = one(), one()
  local o = optim.sgd({{params = a}, {params = b:parameters(), lr = 0.01}}, {lr = 0.1})
  local function step()
    a():backward()
    b():backward()
    o:step()
  end
  step()
  T.near(a.w:item(), 1 - 0.2)
  T.near(b.w:item(), 1 - 0.02)
  T.fails(function() o.groups[1].ram = 1 end, "optim.sgd: unknown key 'ram': " .. USAGE)
  T.fails(function() o.groups[1].clip = 1 end, "optim.sgd: clip cannot be set for a single group")
  T.fails(function() o.groups[3] = {lr = 1} end,
          "optim.sgd: there is no group 3; groups cannot be added to an optimizer")
  T.fails(function() o.groups[2] = {learning_rate = 1} end,
          "optim.sgd: group 2 cannot be replaced; set its settings, such as groups[2].lr")
  T.fails(function() o.groups = {{}, {learning_rate = 1}} end,
          "optim.sgd: unknown key 'groups': " .. USAGE)
  local read = {}
  for g, group in pairs(o.groups) do read[g] = group.lr or "none" end
  T.equal(table.concat(read, " "), "none 0.01")
  T.equal(#o.groups, 2)
  local whole = optim.sgd(one(), {lr = 0.1})
  T.fails(function() whole.groups[1].weight_decai = 3 end,
          "optim.sgd: unknown key 'weight_decai' (did you mean 'weight_decay'?)")
  whole.groups[1].lr = 0.3
  T.equal(whole:settings()["1.lr"], 0.3)
  o.lr, o.groups[2].lr = 0.2, 0
  step()
  T.near(a.w:item(), 1 - 0.2 - 0.4)
  T.near(b.w:item(), 1 - 0.02)
end)

-- A net of a matrix, a vector and a scalar, all 1, with gradients 2, 2 and 2.
local function three()
  return nn.module({
    w = nn.parameter({1, 1}, {value = 1}), b = nn.parameter({1}, {value = 1}),
    c = nn.parameter({}, {value = 1}),
  }, function(self)
    return (self.w * 2):sum() + (self.b * 2):sum() + self.c * 2
  end)
end

T.test("decay_bias = false exempts parameters with at most one axis", function()
  for _, make in ipairs{optim.sgd, optim.adamw} do
    local function updated(options)
      local net = three()
      options.lr = 0.1
      local o = make(net, options)
      net():backward()
      o:step()
      return {net.w:item(), net.b:item(), net.c:item()}
    end
    local with, without = updated{weight_decay = 0.5}, updated{weight_decay = 0.0}
    assert(with[1] < without[1] - 0.01)
    T.equal(with, {with[1], with[1], with[1]})
    T.equal(updated{weight_decay = 0.5, decay_bias = false}, {with[1], without[2], without[3]})
  end
  T.near(after(1, optim.sgd, {lr = 0.1, weight_decay = 0.5, decay_bias = false}), 1 - 0.1 * 2)
end)

T.test("decay_bias differs by group and changes between steps", function()
  local a, b = three(), three()
  local o = optim.sgd({{params = a}, {params = b, decay_bias = true}},
                      {lr = 0.1, weight_decay = 0.5, decay_bias = false})
  local function step()
    (a() + b()):backward()
    o:step()
  end
  step()
  T.near(a.w:item(), 1 - 0.1 * 2.5)
  T.near(a.b:item(), 1 - 0.1 * 2)
  T.near(b.w:item(), 1 - 0.1 * 2.5)
  T.near(b.b:item(), 1 - 0.1 * 2.5)
  o.decay_bias, o.groups[2].decay_bias = true, false
  step()
  T.near(a.b:item(), 0.8 - 0.1 * (2 + 0.5 * 0.8))
  T.near(b.b:item(), 0.75 - 0.1 * 2)
end)

T.test("lr_factor multiplies every lr", function()
  local a, b = one(), one()
  local o = optim.sgd({{params = a}, {params = b, lr = 0.01}}, {lr = 0.1})
  o.lr_factor = 0.5
  a():backward()
  b():backward()
  o:step()
  T.near(a.w:item(), 1 - 0.1)
  T.near(b.w:item(), 1 - 0.01)
  o.lr_factor = -1
  T.fails(function() o:step() end,
          "optim.sgd: 'lr_factor' must be a non-negative number, but is -1")
end)

T.test("clip limits the norm of all gradients together", function()
  local function run(clip)
    local net = three()               -- gradients (2, 2, 2), of norm sqrt(12)
    net:parameters()
    local o = optim.sgd({{params = {net.w}}, {params = {net.b, net.c}, lr = 0.1}},
                        {lr = 0.2, momentum = 0.9, clip = clip})
    net():backward()
    o:step()
    return net, o
  end
  local net, o = run(3)
  local g = 2 * 3 / math.sqrt(12)
  T.near(o.grad_norm, math.sqrt(12))
  T.near(net.w:item(), 1 - 0.2 * g)
  T.near(net.b:item(), 1 - 0.1 * g)
  T.near(net.c:item(), 1 - 0.1 * g)
  net, o = run(4)                     -- above the norm
  T.near(o.grad_norm, math.sqrt(12))
  T.equal(net.w:item(), (run(0.0)).w:item())
  o.clip, o.lr = 3, -1
  net():backward()
  T.fails(function() o:step() end, "optim.sgd: 'lr' must be a non-negative number, but is -1")
  o.clip, o.lr, o.momentum = 0, 0.2, 0
  local before = net.w:item()
  o:step()
  T.near(before - net.w:item(), 0.2 * 2)
  T.equal(o.grad_norm, nil)
end)

T.test("a step does not change frozen parameters, which have no gradient", function()
  local net = nn.sequential{nn.linear{1, 1}, nn.linear{1, 1}}
  local o = optim.sgd(net, {lr = 0.1, weight_decay = 0.1})
  net[2]:freeze()
  local before = net[2].w:item()
  net(lt.ones({1, 1})):sum():backward()
  o:step()
  T.equal(net[2].w:item(), before)
  assert(net[1].w.grad == nil, "step forgets the gradients")
  net(lt.ones({1, 1})):sum():backward()
  o:zero_grad()
  assert(net[1].w.grad == nil)
end)

local NO_BACKWARD = "an optimizer step has no gradients: no backward has run since the last step; "
                    .. "call backward on the loss first"

T.test("a step without a backward is an error", function()
  local net = one()
  local o = optim.sgd(net, {lr = 0.1})
  local n = lt.steps()
  T.fails(function() o:step() end, NO_BACKWARD)
  net():backward()
  o:step()
  T.fails(function() o:step() end, NO_BACKWARD)
  T.fails(function() lt.step(function() net(); o:step() end) end, NO_BACKWARD)
  T.equal(lt.steps(), n + 1)
  T.near(net.w:item(), 0.8)
  net():backward()                                 -- the errors left no state behind
  T.equal(o:step(), "applied")
end)

T.test("a step may have nothing to do after a backward, or with frozen parameters", function()
  local a, b = one(), one()
  local first, second = optim.sgd(a, {lr = 0.1}), optim.sgd(b, {lr = 0.1})
  a():backward()                                   -- two heads, one of them unused by this batch
  first:step()
  second:step()
  T.near(a.w:item(), 0.8)
  T.fails(function() second:step() end, NO_BACKWARD)
  a():backward()
  first:zero_grad()                                -- discards this batch
  first:step()
  b:freeze()                                       -- frozen until a later epoch
  second:step()
  second:step()
  b:freeze(false)
  T.fails(function() second:step() end, NO_BACKWARD)
  T.near(a.w:item(), 0.8)
  T.equal(b.w:item(), 1.0)
end)

T.test("alternating optimizers, as for the generator and the critic of a GAN", function()
  local g, d = one(), one()
  local of_g, of_d = optim.sgd(g, {lr = 0.1}), optim.sgd(d, {lr = 0.1})
  for _ = 1, 2 do
    d():backward()
    of_d:step()
    local loss = g() * d()                         -- d gets a gradient that is not used
    loss:backward()
    of_g:step()
    of_d:zero_grad()
  end
  T.near(d.w:item(), 1 - 2 * 0.1 * 2)
  local both = optim.sgd(g, {lr = 0.1})            -- its gradients are older than of_d's step
  g():backward()
  of_d:step()
  both:step()
end)

T.test("steps are counted", function()
  local n = lt.steps()
  after(3, optim.sgd, {lr = 0.1})
  T.equal(lt.steps(), n + 3)
end)

T.test("settings by name", function()
  local net, other = nn.linear{2, 3}, nn.linear{2, 3}
  net:parameters()                                 -- gives them memory
  local sgd = optim.sgd({{params = {net.w}}, {params = {net.b}, lr = 0.2}}, {lr = 0.1, clip = 5.0})
  local wanted = {lr = 0.1, momentum = 0.0, nesterov = false, weight_decay = 0.0, decay_bias = true,
                  clip = 5.0, lr_factor = 1.0, ["2.lr"] = 0.2}
  T.equal(sgd:settings(), wanted)
  sgd:set("decay_bias", false)
  sgd:set("1.lr", 0.3)
  sgd:set("2.lr", nil)
  sgd:set("3.lr", 0.4)                             -- there is no group 3
  wanted.decay_bias, wanted["1.lr"], wanted["2.lr"] = false, 0.3, nil
  T.equal(sgd:settings(), wanted)
  T.equal({sgd:has(net.w), sgd:has(net.b), sgd:has(other.w)}, {true, true, false})
end)

T.test("an optimizer resumes from its state", function()
  local path = os.tmpname()
  local function run(steps, from, make)
    local net = nn.module({w = nn.parameter({2, 2}, {value = 1})}, function(self)
      return (self.w * self.w):sum()
    end)
    local o = (make or optim.adam)(net, {lr = 0.1})
    if from then
      o:load((lt.load(path)))
      net.w:copy(from)
    end
    for _ = 1, steps do
      net():backward()
      o:step()
    end
    return net, o
  end
  local half, o = run(2)
  lt.save(path, o:state())
  local names = {}
  for name in pairs(o:state()) do names[#names + 1] = name end
  table.sort(names)
  T.equal(names, {"m.w", "step.w", "steps", "v.w"})
  T.equal(run(2, half.w).w:totable(), run(4).w:totable())
  half, o = run(2, nil, optim.lars)
  lt.save(path, o:state())
  T.equal(run(2, half.w, optim.lars).w:totable(), run(4, nil, optim.lars).w:totable())
  lt.save(path, (select(2, run(2))):state())
  T.fails(function() optim.adam(one(), {lr = 1}):load(lt.load(path)) end,
          "optim: m.w is 2x2 f32, but this optimizer has 1 f32")
  local sgd = optim.sgd(one(), {lr = 1, momentum = 0.5})
  T.fails(function() sgd:load({steps = lt.tensor(1)}) end, "optim: the state has no v.w")
  T.fails(function() sgd:load({steps = lt.tensor(1), ["v.w"] = lt.ones({1}), x = lt.ones({1})}) end,
          "optim: the state has x, but this optimizer does not")
  local before = sgd:state()["v.w"]:totable()
  for text, steps in pairs{["2.5"] = 2.5, ["-3"] = -3, ["inf"] = math.huge} do
    local state = {steps = lt.tensor(steps), ["v.w"] = lt.ones({1})}
    T.fails(function() sgd:load(state) end,
            ("optim: 'steps' must be a non-negative integer, but is %s"):format(text))
  end
  T.equal(sgd:state()["v.w"]:totable(), before)
  os.remove(path)
end)

-- A net of two numbers. The gradient of b exists only in every other step.
local function late()
  return nn.module({a = nn.parameter({1}, {value = 1}), b = nn.parameter({1}, {value = 2})},
                   function(self, both) return both and self.a * 3 + self.b * 0.5 or self.a * 3 end)
end

-- Adam's or AdamW's weight after steps with the gradients g, which counts these steps only.
local function adam_weight(w, g, n, o)
  local m, v = 0, 0
  for t = 1, n do
    if o.make == optim.adamw then w = w * (1 - o.lr * o.weight_decay) end
    local d = o.make == optim.adamw and g or g + o.weight_decay * w
    m, v = 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d * d
    w = w - o.lr * (m / (1 - 0.9 ^ t)) / (math.sqrt(v / (1 - 0.999 ^ t)) + 1e-8)
  end
  return w
end

T.test("adam counts the steps of each parameter", function()
  for _, make in ipairs{optim.adam, optim.adamw} do
    local net, o = late(), {make = make, lr = 0.01, weight_decay = 0.1}
    net:to "f64"
    local made = make(net, {lr = o.lr, weight_decay = o.weight_decay})
    local function steps(n, both)
      for _ = 1, n do
        net(both):backward()
        made:step()
      end
    end
    steps(30, false)
    T.equal(net.b:item(), 2.0)
    steps(5, true)
    steps(1, false)
    steps(5, true)
    T.near(net.a:item(), adam_weight(1, 3, 41, o), 1e-12)
    T.near(net.b:item(), adam_weight(2, 0.5, 10, o), 1e-12)
    local state = made:state()
    T.equal({state["step.a"]:item(), state["step.b"]:item(), state.steps:item()}, {41, 10, 41})
  end
end)

T.test("the counts of adam are part of its state; an old state has one count for all", function()
  local function make(from)
    local net = late()
    local o = optim.adam(net, {lr = 0.1})
    if from then o:load(from) end
    return net, o
  end
  local net, o = make()
  for i = 1, 6 do
    net(i > 4):backward()
    o:step()
  end
  local state = o:state()
  local _, copy = make(state)
  T.equal({copy:state()["step.a"]:item(), copy:state()["step.b"]:item()}, {6, 2})
  local old = {}
  for name, tensor in pairs(state) do
    if not name:find "^step%." then old[name] = tensor end
  end
  _, copy = make(old)
  T.equal({copy:state()["step.a"]:item(), copy:state()["step.b"]:item()}, {6, 6})
  old["step.a"] = state["step.a"]
  local _, fresh = make()
  T.fails(function() fresh:load(old) end, "optim: the state has no step.b")
  old["step.b"] = lt.tensor(-1, {dtype = "i64"})
  T.fails(function() fresh:load(old) end,
          "optim: 'step.b' must be a non-negative integer, but is -1")
  local sgd = optim.sgd(late(), {lr = 1})
  T.fails(function() sgd:load({steps = state.steps, ["step.a"] = state.steps}) end,
          "optim: the state has step.a, but this optimizer does not")
end)

T.test("constructors are strict", function()
  local net = one()
  T.fails(function() optim.sgd(net) end, "optim.sgd: 'lr' is missing: " .. USAGE)
  T.fails(function() optim.sgd(net, {lr = 1, momentun = 1}) end,
          "optim.sgd: unknown key 'momentun' (did you mean 'momentum'?)")
  T.fails(function() optim.sgd(5, {lr = 1}) end,
          "optim.sgd requires a net, a list of parameters or a list of groups")
  T.fails(function() optim.sgd({}, {lr = 1}) end, "optim.sgd: there are no parameters to optimize")
  T.fails(function() optim.sgd({lt.ones({1})}, {lr = 1}) end,
          "optim.sgd: item 1 of the list is not a parameter")
  T.fails(function() optim.sgd({{params = net, lrr = 1}}, {lr = 1}) end,
          "optim.sgd: unknown key 'lrr' (did you mean 'lr'?)")
  T.fails(function() optim.sgd({{params = net, lr_factor = 1}}, {lr = 1}) end,
          "optim.sgd: lr_factor cannot be set for a single group")
  T.fails(function() optim.sgd(net, {lr = 1, clip = -1}) end,
          "optim.sgd: 'clip' must be a non-negative number, but is -1")
  T.fails(function() optim.sgd({{lr = 1}}, {lr = 1}) end, "optim.sgd: group 1 has no params")
  T.fails(function() return optim.rmsprop end, "optim has no 'rmsprop'")
end)

T.finish()
