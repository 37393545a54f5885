-- test_scaler_ranks.lua - several ranks: equal scalers, leftover gradients, headroom.

local T = require "lt_test"

-- arg[1] is what differs on rank 1.
local SCRIPT = [[
local lt = require "luatrain"
local WHAT, other = arg[1], lt.rank() == 1
local net = lt.nn.linear{4, 2}
local sgd = lt.optim.sgd(net, {lr = 0.1})
local function step()
  net(lt.ones{4, 4}):sum():backward()
  return sgd:step()
end
if WHAT == "run" then
  local run <close> = lt.run{net = net, optim = sgd, train = (lt.data.open "synthetic:2x2x1/2/16"),
                             epochs = 1, batch = 8, scaler = {scale = other and 8 or 16}}
elseif WHAT == "precision" then
  local run <close> = lt.run{net = net, optim = sgd, train = (lt.data.open "synthetic:2x2x1/2/16"),
                             epochs = 1, batch = 8, scaler = not other and {}}
end
local options = {policy = "dynamic", scale = 256}
if other then
  if WHAT == "policy" then options.policy = "static" end
  if WHAT == "scale" then options.scale = 8 end
  if WHAT == "interval" then options.growth_interval = 7 end
end
if WHAT == "one" and other then step() end
local scaler <close> = lt.amp.scaler(options)
step()
local state = scaler:state()
if other then
  if WHAT == "k" then state.k = 3 end
  if WHAT == "good" then state.good = 0 end
end
scaler:load(state)
print(step(), scaler.steps)
]]

local function run(what, options) return T.run_script(SCRIPT, "--ranks 2 " .. options, what) end

T.test("ranks with equal scalers train", function()
  for _, wire in ipairs{"fp32", "fp16"} do
    T.equal({run("nothing", "--wire " .. wire)}, {"applied\t2\n", 0})
  end
end)

T.test("the error of different scalers names the difference", function()
  local scale = "the loss scale: "
  for what, message in pairs{
    policy = scale .. "rank 0 has 'policy dynamic', rank 1 has 'policy static'",
    scale = scale .. "rank 0 has 'scale 256', rank 1 has 'scale 8'",
    interval = scale .. "rank 0 has 'interval 2000', rank 1 has 'interval 7'",
    k = scale .. "rank 0 has 'scale 256', rank 1 has 'scale 8'",
    good = scale .. "rank 0 has 'good 1', rank 1 has 'good 0'",
    one = "the loss scale",
    run = scale .. "rank 0 has 'scale 16', rank 1 has 'scale 8'",
    precision = "the precision: rank 0 has 'fp16 with a loss scale', rank 1 has 'fp16'"} do
    local is_run = what == "run" or what == "precision"
    local text, code = run(what, "--wire fp16 " .. (is_run and "--amp fp16" or ""))
    assert(text:find("the ranks disagree: " .. (what == "one" and "" or message), 1, true),
           what .. ": " .. text)
    assert(text:find(message, 1, true), what .. ": " .. text)
    T.equal(code, 9)
  end
end)

-- ==== Between backward and step ==================================================================

local run_script = T.run_script

-- The net is large enough that backward returns while buckets are in flight.
local BETWEEN = [[
local lt = require "luatrain"
local net = lt.nn.sequential{lt.nn.linear{64, 64}, lt.nn.linear{64, 64}, lt.nn.linear{64, 64}}
local x = lt.ones{2, 64}
local sgd = lt.optim.sgd(net, {lr = 1.0})
local scaler <close> = lt.amp.scaler{policy = "dynamic", scale = 1.0, growth_interval = 3}
for i = 1, 60 do
  local power = (i * 37) % 60 - 30
  sgd.lr = 2.0 ^ (-24 - power)
  ;(net(x):sum() * 2.0 ^ power):backward()
  if arg[1] == "begin" then scaler:begin() end
  if arg[1] == "load" then scaler:load(scaler:state()) end
  sgd:step()
end
print(scaler.scale, scaler.skipped, net:sha256())
]]

T.test("a call of the scaler between backward and step waits for the gradient exchange", function()
  local wanted = run_script(BETWEEN, "--ranks 2 --wire fp16", "nothing")
  for _, what in ipairs{"begin", "load"} do
    T.equal({run_script(BETWEEN, "--ranks 2 --wire fp16", what)}, {wanted, 0})
  end
end)

-- Only rank 1 closes the scaler.
local CLOSES = [[
local lt = require "luatrain"
local net = lt.nn.linear{4, 2}
local sgd = lt.optim.sgd(net, {lr = 0.1})
local scaler = lt.amp.scaler{}
for i = 1, 4 do
  if i == 3 and lt.rank() == 1 then scaler:close() end
  net(lt.ones{4, 4}):sum():backward()
  sgd:step()
end
]]

T.test("a scaler that is in use on one rank only is an error", function()
  for _, wire in ipairs{"fp32", "bf16", "fp16"} do
    local text, code = run_script(CLOSES, "--ranks 2 --wire " .. wire)
    assert(text:find("a loss scale must be in use on all ranks, or on none", 1, true), text)
    T.equal(code, 9)
  end
end)

-- ==== Leftover gradients =========================================================================

-- `rare` has a leftover gradient. It is 64 times larger than the others or, with "inf", not finite
-- and older than the scaler. `lost` has gradients that are larger still, and its optimizer is gone.
local WAITS = [[
local lt = require "luatrain"
local net, rare, lost = lt.nn.linear{4, 2}, lt.nn.linear{4, 2}, lt.nn.linear{4, 2}
local x = lt.tensor{{1.0, 2.0, 3.0, 5.0}}
net(x) rare(x) lost(x)
local sgd, seldom = lt.optim.sgd(net, {lr = 2.0 ^ -8}), lt.optim.sgd(rare, {lr = 2.0 ^ -8})
local gone = lt.optim.sgd(lost, {lr = 1.0})
gone = nil
collectgarbage() collectgarbage()
local scaler <close> = lt.amp.scaler{}
if arg[1] == "inf" then
  scaler:close()
  rare.w:on_grad(function(g) g:copy(g / 0) end)
end
;(net(x):sum() + rare(x):sum() * 64):backward()
print(sgd:step())
if arg[1] == "inf" then scaler:begin() end
for i = 1, 12 do
  lost:zero_grad()
  ;(net(x):sum() + lost(x):sum() * 2.0 ^ 12):backward()
  print(sgd:step(), scaler.scale, scaler.headroom, net:sha256())
end
print(seldom:step(), scaler.skipped)
]]

T.test("a gradient that is left over or has no optimizer does not affect other steps", function()
  for _, what in ipairs{"large", "inf"} do
    local wanted = run_script(WAITS, "", what)
    assert(wanted:find("\t0\n$"), wanted)                                   -- skipped
    for _, options in ipairs{"--ranks 2", "--ranks 2 --wire fp16", "--ranks 3 --wire bf16",
                             "--ranks 2 --deterministic --vranks 2"} do
      T.equal(run_script(WAITS, options, what), wanted)
    end
  end
end)

-- The gradient of `rare` is computed under a scaler, and its optimizer steps after the scaler is
-- closed. With --vranks, a rank may compute several shards in between.
local LEFT = [[
local lt = require "luatrain"
local labels = {}
for i = 1, 16 do labels[i] = i % 3 end
local data = lt.data.set{images = lt.randn({16, 2, 2, 1}),
                         labels = lt.tensor(labels, {dtype = "i64"})}
local net, rare = lt.nn.linear{4, 3}, lt.nn.linear{4, 3}
net(lt.ones{1, 4}) rare(lt.ones{1, 4})
local sgd, seldom = lt.optim.sgd(net, {lr = 0.1}), lt.optim.sgd(rare, {lr = 0.1})
local scaler = lt.amp.scaler{}
local steps = 0
for x, y in data:batches{batch = 8, shuffle = true, epoch = 1} do
  x = x:reshape{-1, 4}
  lt.cross_entropy(steps == 0 and net(x) + rare(x) or net(x), y):backward()
  local outcome = sgd:step()
  if outcome ~= "accumulating" then
    if steps == 1 then print(pcall(seldom.step, seldom)) end
    steps = steps + 1
    scaler:close()
  end
end
]]

T.test("a leftover gradient keeps the loss scale under which it was computed", function()
  for _, options in ipairs{"", "--ranks 2", "--deterministic --vranks 4",
                           "--deterministic --vranks 4 --ranks 2",
                           "--deterministic --vranks 4 --ranks 4"} do
    local text = run_script(LEFT, options)
    assert(text:find("gradients of a loss scale that is no longer in use", 1, true), text)
  end
end)

-- The powers jump by more than the resends of a bucket can follow.
T.test("headroom is the same as on one rank, with any wire", function()
  local script = [[
local lt = require "luatrain"
local net = lt.nn.linear{4, 2}
local sgd = lt.optim.sgd(net, {lr = 2.0 ^ -126})
local scaler <close> = lt.amp.scaler{policy = "static", scale = 1.0}
for _, power in ipairs(arg) do
  ;(net(lt.tensor{{1.0, 2.0, 3.0, 5.0}}):sum() * 2.0 ^ power):backward()
  sgd:step()
  print(scaler.headroom)
end]]
  for _, wire in ipairs{"fp32", "bf16", "fp16"} do
    T.equal(run_script(script, "--ranks 2 --wire " .. wire, "0 120 -120 3"),
            run_script(script, "", "0 120 -120 3"))
  end
end)

-- ==== Errors of a script =========================================================================

T.test("the error of an extra backward names the rank", function()
  local text, code = run_script([[
local lt = require "luatrain"
local net = lt.nn.linear{4, 2}
local sgd = lt.optim.sgd(net, {lr = 0.1})
for i = 1, 5 do
  if i == 3 and lt.rank() == 1 then net(lt.ones{4, 4}):sum():backward() end
  net(lt.ones{4, 4}):sum():backward()
  sgd:step()
end]], "--ranks 2")
  assert(text:find("rank 1 ran 2 backward passes before a step, but rank 0 ran 1", 1, true), text)
  T.equal(code, 9)
end)

T.finish()
