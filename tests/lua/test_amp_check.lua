-- test_amp_check.lua - lt.amp.check and --amp-check: their results, and that they do not change the
-- training.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

-- ==== Runs =======================================================================================

-- Trains with dropout, batch norm, random numbers and micro-batches, in a loop or with lt.fit.
local SCRIPT = [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{micro = 2, fit = false, mixup = 0.0, zero = false, sync = false, extra = false}
local train, test = lt.data.open "synthetic:6x6x1/3/96"
local norm = opt.sync and nn.sync_batch_norm or nn.batch_norm
local net = nn.sequential{nn.conv2d{1, 8, 3, pad = 1}, norm{8}, nn.relu(), nn.dropout{0.3},
                          nn.flatten(), nn.linear{288, 3}}
local settings = {net = net, train = train, epochs = 2, batch = 22, mixup = opt.mixup,
                  optim = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9, clip = 5})}
if opt.fit then
  settings.test, settings.accumulate = test, opt.micro
  lt.fit(settings)
  return
end
local run <close> = lt.run(settings)
local calls, ends, losses = 0, 0, {}
local function whole(_, x, y)
  return function(_, last) if not last then return x, y, 1.0 end end
end
local parts = opt.micro > 1 and lt.micro_batches or whole
for epoch in run:epochs() do
  for x, y in run:batches() do
    if opt.extra then net(x) end
    run:step(function()
      if opt.zero then settings.optim:zero_grad() end
      local sum = 0
      calls = calls + 1
      for x_i, y_i, share in parts(opt.micro, x, y) do
        local noise = lt.randn(x_i.shape)
        local loss = lt.cross_entropy(net(x_i + noise * 0.1), y_i) * share
        losses[#losses + 1] = loss:item()
        loss:backward()
        sum = sum + loss:item()
      end
      settings.optim:step()
      ends = ends + 1
      return sum
    end)
  end
  run:report(run:evaluate(test))
end
print(("calls %d ends %d"):format(calls, ends))
-- losses[1] and [2] are of the check, in half precision and in f32; [3] is of the first step.
print(losses[1] == losses[3] and losses[1] ~= losses[2] and "the same random numbers" or "others")
]]

local events, out = T.events, T.folder(SCRIPT)

-- Checks that two runs with these arguments, one of them with --amp-check, are equal. Returns the
-- events of the checks and what that run printed.
local function same_run(name, before, after)
  T.ends(out, ("%s --out %s.off t.lua %s"):format(before, name, after), 0, "")
  local text = T.ends(out, ("%s --amp-check 4 --out %s.on t.lua %s"):format(before, name, after), 0,
                      "")
  local plain, checked = out .. "/" .. name .. ".off", out .. "/" .. name .. ".on"
  T.equal(T.sha(checked), T.sha(plain))
  local a, b = events(plain, "step"), events(checked, "step")
  T.equal(#a, 10)
  for i = 1, #a do
    for _, key in ipairs{"loss", "scale", "skipped", "headroom", "lr"} do
      T.equal(b[i][key], a[i][key])
    end
  end
  T.equal(#events(plain, "amp_check"), 0)
  local checks = events(checked, "amp_check")
  for i, found in ipairs(checks) do T.equal(found.step, 4 * i - 3) end
  return checks, text
end

T.test("checks do not change a run", function()
  local n = 0
  for _, case in ipairs{
    {"--threads 1 --amp fp16", ""},
    {"--threads 1 --amp bf16", "--zero --extra --micro 1"},
    {"--threads 1 --amp fp16", "--fit"},
    {"--threads 1 --amp bf16", "--fit --micro 1 --mixup 0.4"},
    {"--ranks 2 --threads 1 --amp fp16", ""},
    {"--ranks 2 --threads 1 --amp fp16 --wire fp16", "--fit"},
    {"--ranks 2 --threads 1 --amp bf16", "--sync --micro 1"},
    {"--deterministic --vranks 4 --amp fp16", ""},
    {"--ranks 2 --deterministic --vranks 4 --amp bf16", "--fit"},
  } do
    n = n + 1
    local checks, text = same_run("case" .. n, table.unpack(case))
    T.equal(#checks, 3)
    if n <= 2 then                       -- each of 3 checks adds 2 calls that do not reach the end
      assert(text:find("calls 16 ends 10\nthe same random numbers", 1, true), text)
    end
  end
end)

T.test("the event and the line of a check", function()
  local found, names = events(out .. "/case1.on", "amp_check")[1], {}
  T.equal(found.scale, 65536.0)
  assert(found.loss ~= found.loss_f32 and math.abs(found.loss - found.loss_f32) < 1e-2)
  for i, layer in ipairs(found.layers) do names[i] = layer.layer end
  T.equal(table.concat(names, " "), "mul add net.1 net.2 net.4 net.6 cross_entropy")
  assert(found.layers[3].output > 1e-5 and found.layers[3].output < 1e-2)
  local text = T.run(out, "--threads 1 --amp fp16 --amp-check 100 t.lua")
  assert(text:find("\namp check at step 1, scale 65536: loss %d%.%d+, in f32 %d%.%d+; worst "
                   .. "error [%d.e-]+ %% in net%.%d %([%w ]+%), "), text)
  T.equal(select(2, text:gsub("amp check", "")), 1)
end)

T.test("--amp-check requires half precision", function()
  for _, amp in ipairs{"", "--amp off"} do
    T.equal({T.run(out, amp .. " --amp-check 4 --out refused t.lua")},
            {"luatrain: --amp-check N compares half precision with f32; it requires --amp bf16, "
             .. "fp16 or auto\n", 2})
  end
  local text = T.ends(out, "--threads 1 --amp auto --amp-check 1 --out auto --max-steps 10 t.lua",
                      0, "")           -- the trial has 14 steps
  assert(not text:find "amp check", text)
end)

T.test("functions that cannot be checked", function()
  local function check_fails(name, body, message)
    T.write(out .. "/wrong.lua", (SCRIPT:gsub("local sum = 0\n", body .. "\n%0")))
    T.ends(out, ("--threads 1 --amp fp16 --amp-check 4 --out %s wrong.lua"):format(name), 1,
           message)
  end
  check_fails("none", "if true then return 0 end",
      "amp check: the function returned without calling backward")
  check_fails("error", "error 'enough'", "wrong.lua:26: enough")
  check_fails("step", "settings.optim:step()", "in a dry run, which leaves no gradients")
end)

-- ==== lt.amp.check ===============================================================================

local function layer_named(found, name)
  for _, layer in ipairs(found.layers) do
    if layer.layer == name then return layer end
  end
  error("no layer " .. name)
end

-- Returns two linear layers with weights that fit into f16 and biases of 0.
local function make_net(a, b)
  local net = nn.sequential{nn.linear{4, 4}, nn.linear{4, 2}}
  net(lt.ones{1, 4})
  for i, value in ipairs{a, b} do
    net[i].w:copy(lt.ones(net[i].w.shape) * value)
    net[i].b:copy(lt.zeros(net[i].b.shape))
  end
  return net
end

T.test("underflow, overflow and rounding of a layer", function()
  local function find(a, b, x)
    local net = make_net(a, b)
    return lt.amp.check(lt.autocast, "fp16", function() net(lt.ones{3, 4} * x):sum():backward() end)
  end
  local found = find(2.0 ^ -14, 1.0, 2.0 ^ -13)         -- 4 times 2^-27
  T.equal(layer_named(found, "net.1").underflow, 1.0)
  T.equal(layer_named(found, "net.1").output, 1.0)
  T.equal(layer_named(found, "net.2").input_grad, 0.0)
  T.equal(found.loss, 0.0)
  T.equal(found.loss_f32, 6 * 4 * 2.0 ^ -25)
  T.equal(found.scale, 1.0)
  found = find(1.0, 30000.0, 1.0)
  T.equal(layer_named(found, "net.2").overflow, 1.0)    -- 480000
  T.equal(layer_named(found, "net.1").overflow, 0.0)    -- its gradient is 60000
  found = find(1.0, 4.0, 1 + 2.0 ^ -12)
  T.near(layer_named(found, "net.1").output, 2.0 ^ -12, 1e-7)
  T.near(layer_named(found, "net.1").param_grad, 2.0 ^ -12 * (1 / 2) ^ 0.5, 1e-4)
  T.equal(layer_named(found, "net.1").underflow, 0.0)
  T.equal(found.overflow, 0.0)
end)

T.test("the loss scale in use is in the gradients", function()
  local net, scaler <close> = make_net(1.0, 1.0), lt.amp.scaler{scale = 2.0 ^ 24}
  local function check()
    return lt.amp.check(lt.autocast, "fp16", function() net(lt.ones{3, 4}):sum():backward() end)
  end
  local found = check()
  T.equal(found.scale, 2.0 ^ 24)
  T.equal(layer_named(found, "net.2").overflow, 1.0)
  assert(found.overflow > 0.5)
  scaler:close()
  T.equal(check().overflow, 0.0)
end)

T.test("a check has no side effects", function()
  local net = make_net(0.3, 0.7)
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  local hooks = 0
  net[1].w:on_grad(function() hooks = hooks + 1 end)
  local function go() net(lt.randn{3, 4}):sum():backward() end
  go()
  local grad, sha256 = net[1].w.grad:totable(), net:sha256()
  lt.seed(3)
  local drawn = lt.randn{1}:item()
  lt.seed(3)
  lt.amp.check(lt.autocast, "bf16", go)
  T.equal(lt.randn{1}:item(), drawn)
  T.equal(hooks, 1)
  T.equal(net[1].w.grad:totable(), grad)
  T.equal(net:sha256(), sha256)
  lt.autocast("bf16", function()
    T.equal(lt.matmul(lt.ones{1, 1}, lt.ones{1, 1}).dtype, "bf16")
    lt.amp.check(go)
    T.equal(lt.matmul(lt.ones{1, 1}, lt.ones{1, 1}).dtype, "bf16")
  end)
  T.equal(sgd:step(), "applied")
  go()
  T.equal(hooks, 2)
end)

-- A very long name keeps only its end, where layers differ.
T.test("layers with long names are distinguished", function()
  local function check(depth)
    local net = nn.sequential{nn.linear{4, 4}, nn.linear{4, 2}}
    for _ = 1, depth do
      net = nn.module({inverted_residual = net}, function(self, x)
        return self.inverted_residual(x)
      end, "block")
    end
    local found = lt.amp.check(lt.autocast, "fp16", function()
      net(lt.ones{3, 4}):sum():backward()
    end)
    return found.layers[1].layer, found.layers[2].layer
  end
  local one, two = check(5)
  T.equal(one, "net" .. (".inverted_residual"):rep(5) .. ".1")
  T.equal(two, "net" .. (".inverted_residual"):rep(5) .. ".2")
  one, two = check(9)
  local path = "net" .. (".inverted_residual"):rep(9)
  T.equal(one, "..." .. (path .. ".1"):sub(-115))
  T.equal(two, "..." .. (path .. ".2"):sub(-115))
end)

T.test("autocast within the function is off in the second pass", function()
  local net, dtypes = make_net(1.0, 1.0), {}
  lt.amp.check(function()
    lt.autocast("fp16", function()
      local y = net(lt.ones{3, 4})
      dtypes[#dtypes + 1] = y.dtype
      y:sum():backward()
      dtypes[#dtypes + 1] = "never"
    end)
  end)
  T.equal(dtypes, {"f16", "f32"})
end)

T.test("one rank may check alone", function()
  T.equal({T.run(T.folder [[
local lt = require "luatrain"
local net = lt.nn.sequential{lt.nn.linear{4, 4}, lt.nn.sync_batch_norm{4}}
local sgd = lt.optim.sgd(net, {lr = 0.1})
local function go() net(lt.randn{8, 4}):sum():backward() end
local found = lt.on_root(lt.amp.check, lt.autocast, "bf16", go)
go()
print(found and #found.layers, sgd:step())
]], "--ranks 2 --threads 1 t.lua")}, {"3\tapplied\n", 0})
end)

T.test("invalid calls", function()
  local net = make_net(1.0, 1.0)
  local function go() net(lt.ones{3, 4}):sum():backward() end
  T.fails(function() lt.amp.check(7) end, "amp check requires a function, but got 7")
  T.fails(function() lt.amp.check(go) end,
          "amp check: the function computes nothing in half precision; run it under lt.autocast")
  T.fails(function() lt.amp.check(function() end) end,
          "amp check: the function returned without calling backward")
  T.fails(function() lt.amp.check(function() error "why" end) end, "why")
  T.fails(function() lt.autocast("fp16", lt.amp.check, function() lt.amp.check(go) end) end,
          "a dry run cannot begin within another one")
  T.fails(function() lt.amp.check(function() lt.amp.scaler{} end) end,
          "the loss scale cannot change in a dry run")
  -- An error ends the first backward of a pass. The script may catch it and fail later.
  local found = lt.autocast("fp16", lt.amp.check, function() pcall(go) error "never mind" end)
  assert(#found.layers > 0)
  T.fails(function() return lt.amp.chekc end, "lt.amp has no 'chekc' (did you mean 'check'?)")
end)

T.finish()
