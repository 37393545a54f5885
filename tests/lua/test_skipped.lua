-- test_skipped.lua - a skipped step leaves no gradients or statistics behind.

local T = require "lt_test"
local lt = require "luatrain"
local nn = lt.nn

-- Returns optimizers for two layers, the second layer, and a function that runs backward through
-- the first or both. Its loss is multiplied by factor: with 1e35, the gradients overflow.
local function two_layers()
  local first, second = nn.linear{4, 2}, nn.linear{2, 2}
  local a, b = lt.optim.sgd(first, {lr = 0.1}), lt.optim.sgd(second, {lr = 0.1})
  local x = lt.ones{3, 4}
  local function backward(through_both, factor)
    local y = first(x)
    if through_both then y = second(y) end
    (y:sum() * factor):backward()
  end
  return a, b, second, backward
end

T.test("a leftover gradient of a skipped step is not applied later", function()
  for _, factor in ipairs{1e35, 1} do
    local a, b, second, backward = two_layers()
    local before = second:sha256()
    local scaler <close> = lt.amp.scaler{scale = 2.0 ^ 16}
    backward(true, factor)
    T.equal(a:step(), factor == 1 and "applied" or "skipped")
    backward(false, 1)                         -- the second layer has a leftover gradient
    T.equal(a:step(), "applied")
    T.equal(b:step(), "applied")
    T.equal(second:sha256() == before, factor ~= 1)
    T.equal(scaler.skipped, factor == 1 and 0 or 1)
  end
end)

-- The same with ranks. arg[1] is the rank that runs backward through both layers, or -1 for all.
local RANKS = [[
local lt = require "luatrain"
local first, second = lt.nn.linear{4, 2}, lt.nn.linear{2, 2}
local a, b = lt.optim.sgd(first, {lr = 0.1}), lt.optim.sgd(second, {lr = 0.1})
local scaler <close> = lt.amp.scaler()
local function backward(through_both, factor)
  local y = first(lt.ones{4, 4})
  if through_both then y = second(y) end
  (y:sum() * factor):backward()
end
local who = tonumber(arg[1])
backward(who < 0 or who == lt.rank(), 1e35)
local outcomes = {a:step()}
backward(false, 1)
outcomes[2], outcomes[3] = a:step(), b:step()
backward(true, 1)
outcomes[4], outcomes[5] = a:step(), b:step()
print(table.concat(outcomes, " "), second:sha256(), scaler.skipped)
]]

T.test("a leftover gradient of a skipped step on one rank is not applied by others", function()
  local out = T.folder(RANKS)
  for _, wire in ipairs{"fp32", "fp16"} do
    local wanted
    for who = -1, 1 do
      local text = T.run(out, ("--ranks 2 --threads 1 --wire %s t.lua %d"):format(wire, who))
      wanted = wanted or text
      T.equal(text, wanted)
      T.equal(text:match "^[a-z ]*", "skipped applied applied applied applied")
    end
  end
end)

-- Rank 0 adds inf to a leftover gradient of the first layer. Then the scaler is closed and begun
-- again, or a backward runs that does not go through this layer.
local WAITING = [[
local lt = require "luatrain"
local first, second = lt.nn.linear{4, 2}, lt.nn.linear{4, 2}
local a, b = lt.optim.sgd(first, {lr = 0.1}), lt.optim.sgd(second, {lr = 0.1})
local scaler <close> = lt.amp.scaler()
local x = lt.ones{4, 4}
local before = first:sha256()
local function backward(through_first, factor)
  local loss = second(x):sum()
  if through_first then loss = loss + first(x):sum() * factor end
  loss:backward()
end
backward(true, 1)
local outcomes = {b:step()}
backward(lt.rank() == 0, 1e35)
outcomes[2] = b:step()
if arg[1] == "again" then
  scaler:close()
  scaler:begin()
else
  backward(false, 1)
end
outcomes[3] = a:step()
outcomes[4] = tostring(first:sha256() == before)
io.stdout:write(table.concat(outcomes, " ") .. "\n")     -- one write, as ranks share stdout
]]

T.test("all ranks discard a leftover gradient that is not finite", function()
  local out = T.folder(WAITING)
  for what, last in pairs{again = "skipped", backward = "applied"} do
    local line = ("applied skipped %s true\n"):format(last)
    T.equal(T.run(out, "--threads 1 t.lua " .. what), line)
    for _, wire in ipairs{"fp32", "fp16"} do
      local command = ("--ranks 2 --threads 1 --wire %s t.lua %s"):format(wire, what)
      T.equal(T.run(out, command), line:rep(2))
    end
  end
end)

-- The first layer's gradient is sent with each step until its optimizer steps. It shares a bucket
-- with a gradient that is a million times smaller.
local RARELY = [[
local lt = require "luatrain"
local first, second = lt.nn.linear{4, 4}, lt.nn.linear{4, 2}
lt.nn.sequential{first, second}(lt.ones{1, 4})
local a, b = lt.optim.sgd(first, {lr = 2.0 ^ -20}), lt.optim.sgd(second, {lr = 2.0 ^ -20})
local scaler <close> = lt.amp.scaler()
local x = lt.ones{4, 4}
for i = 1, 4 do
  local loss = second(x):sum() * 2.0 ^ -10
  if i == 1 then loss = loss + first(x):sum() * 2.0 ^ 10 end
  loss:backward()
  assert(b:step() == "applied")
end
print(a:step(), first:sha256(), scaler.skipped)
]]

T.test("a leftover gradient does not change on an f16 wire", function()
  local out = T.folder(RARELY)
  local wanted = T.run(out, "--ranks 2 --threads 1 --wire fp32 t.lua")
  T.equal(wanted:match "^%w+", "applied")
  T.equal(T.run(out, "--ranks 2 --threads 1 --wire fp16 t.lua"), wanted)
  T.equal(T.run(out, "--threads 1 t.lua"), wanted)
end)

-- A net with two optimizers. `a` steps at every third step, with the gradient of two steps before.
local SELDOM = [[
local lt = require "luatrain"
local first, second = lt.nn.linear{12, 4}, lt.nn.linear{12, 2}
local net = lt.nn.sequential{first, second}:to "f64"
local a, b = lt.optim.sgd(first, {lr = 0.1}), lt.optim.sgd(second, {lr = 0.1})
local train, steps = lt.data.open "synthetic:2x2x3/2/64", 0
for x, y in train:batches{batch = 8, shuffle = true, epoch = 1} do
  lt.step(function()
    local x = x:reshape{x:dim(1), 12}:cast "f64"
    local loss = lt.cross_entropy(second(x), y)
    if steps % 3 == 0 then loss = loss + lt.cross_entropy(first(x), y) end
    loss:backward()
    local outcome = b:step()
    if steps % 3 == 2 then a:step() end
    if outcome == "applied" then steps = steps + 1 end
  end)
end
if lt.rank() == 0 then print(("%d %.12f"):format(steps, (first.w * first.w):sum():item())) end
]]

T.test("a leftover gradient does not change in the steps of other optimizers", function()
  local out = T.folder(SELDOM)
  local wanted = T.run(out, "--threads 1 t.lua")
  T.equal(wanted:match "^%d+ ", "8 ")
  for _, options in ipairs{"--ranks 2", "--deterministic --vranks 2",
                           "--ranks 2 --deterministic --vranks 4"} do
    T.equal(T.run(out, ("--threads 1 %s t.lua"):format(options)), wanted)
  end
end)

T.test("a step that one optimizer has skipped is skipped by the next one", function()
  local a, b, second, backward = two_layers()
  local before = second:sha256()
  local scaler <close> = lt.amp.scaler()
  backward(true, 1e35)
  T.equal(a:step(), "skipped")
  T.equal(b:step(), "skipped")
  T.equal(second:sha256(), before)
  T.equal(scaler.skipped, 1)
end)

T.test("a step that fails does not change running statistics", function()
  local function train(fails)
    local net = nn.sequential{nn.linear{4, 2}, nn.batch_norm{2}}
    for _, p in ipairs(net:parameters()) do p:copy(lt.full(p.shape, 0.5)) end
    local sgd = lt.optim.sgd(net, {lr = 0.1, clip = 1.0})
    local x = lt.arange(24):reshape{6, 4}
    local y = x * x
    local grad_factor = 0 / 0
    net[1].w:on_grad(function() net[1].w.grad:copy(net[1].w.grad * grad_factor) end)
    if fails then
      net(y):sum():backward()
      T.raises("the norm of the gradients is nan", sgd.step, sgd)
      net:zero_grad()
    end
    grad_factor = 1
    net(x):sum():backward()
    T.equal(sgd:step(), "applied")
    return net:sha256()
  end
  T.equal(train(true), train(false))
end)

T.test("steps that overflow at any scale do not change running statistics", function()
  local net = nn.sequential{nn.linear{4, 2}, nn.batch_norm{2}, nn.linear{2, 2}}
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  local _ <close> = lt.amp.scaler{policy = "static"}
  local before, steps = net:sha256(), 0
  T.raises("10 steps in a row", function()
    for _ = 1, 20 do
      (net(lt.arange(24):reshape{6, 4}):sum() * 1e35):backward()
      sgd:step()
      steps = steps + 1
    end
  end)
  T.equal(steps, 9)
  net:zero_grad()
  T.equal(net:sha256(), before)
end)

T.test("a skipped step does not affect later gradients without the scale", function()
  local a, b, second, backward = two_layers()
  local scaler = lt.amp.scaler()
  backward(true, 1e35)
  T.equal(a:step(), "skipped")
  scaler:close()
  T.equal(scaler:inside(b.step, b), "skipped") -- belongs to that step
  local before = second:sha256()
  backward(true, 1)
  T.equal(scaler:inside(a.step, a), "applied")
  T.equal(scaler:inside(b.step, b), "applied")
  T.equal(second:sha256() == before, false)
  T.equal(scaler.skipped, 1)
  scaler:inside(function()
    backward(true, 1e35)
    T.equal(a:step(), "skipped")
  end)
  b:zero_grad()
  backward(true, 1)
  before = second:sha256()
  scaler:inside(backward, false, 1)            -- leaves the second layer's gradients as they are
  T.equal(scaler:inside(b.step, b), "applied")
  T.equal(second:sha256() == before, false)
end)

-- Prints the outcomes of three steps. In the second one, a hook on the last rank writes inf.
local HOOK = [[
local lt = require "luatrain"
local fc = lt.nn.linear{4, 2}
local sgd = lt.optim.sgd(fc, {lr = 0.1})
local scaler <close> = lt.amp.scaler()
local outcomes = {}
fc.w:on_grad(function(g)
  if #outcomes == 1 and lt.rank() == select(2, lt.rank()) - 1 then g:fill(math.huge) end
end)
for t = 1, 3 do
  fc(lt.ones{4, 4}):sum():backward()
  outcomes[t] = sgd:step()
end
print(table.concat(outcomes, " "), fc.w:sum():item() > -math.huge, scaler.skipped)
]]

T.test("a gradient in which a hook writes inf is not applied", function()
  local out = T.folder(HOOK)
  for _, options in ipairs{"", "--ranks 2", "--ranks 2 --wire fp16", "--ranks 2 --wire bf16"} do
    T.equal((T.run(out, options .. " --threads 1 t.lua")), "applied skipped applied\ttrue\t1\n")
  end
end)

T.test("invalid intervals of a scaler", function()
  for _, interval in ipairs{0, 2 ^ 31 | 0, math.maxinteger} do
    T.fails(function() lt.amp.scaler{policy = "dynamic", growth_interval = interval} end,
            ("amp.scaler: 'growth_interval' must be 1 to 2147483647, but is %d"):format(interval))
  end
  T.fails(function() lt.amp.scaler{growth_interval = 7} end,
          "amp.scaler: 'growth_interval' is only for policy dynamic, not for adaptive")
end)

T.finish()
