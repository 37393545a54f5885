-- test_wire.lua - an fp16 wire without a loss scale.

local T = require "lt_test"

-- Gradients are integers times a power of two, which differs by step. The learning rate is divided
-- by the same power, so the weights depend only on the number of steps, unless fp16 rounds.
local STEPS = [[
local lt = require "luatrain"
local net = lt.nn.linear{4, 2}
local sgd = lt.optim.sgd(net, {lr = 1.0})
local x = lt.tensor{{1.0, 2.0, 3.0, 5.0}}
for _, power in ipairs(arg) do
  sgd.lr = 2.0 ^ (-8 - power)
  ;(net(x):sum() * 2.0 ^ power):backward()
  sgd:step()
end
print(net:sha256())
]]

-- Runs a script, which must end well. Returns its output.
local function run(...)
  local text, code = T.run_script(...)
  T.equal(code, 0)
  return text
end

T.test("gradients of any size are exact on an fp16 wire", function()
  local wanted = run(STEPS, "", "0 0 0 0")
  for _, powers in ipairs{"0 0 0 0", "20 20 20 20", "-30 -30 -30 -30", "-20 20 -20 60",
                          "90 -90 100 -95"} do
    for _, amp in ipairs{"off", "bf16"} do
      T.equal(run(STEPS, "--ranks 2 --wire fp16 --amp " .. amp, powers), wanted)
    end
  end
end)

-- In step 1, a backward under a scaler is discarded, and the scaler is closed. `lost` has larger
-- gradients than the other parameters, and its optimizer is gone.
local CHANGES = [[
local lt = require "luatrain"
local net, lost = lt.nn.linear{4, 2}, lt.nn.linear{4, 2}
local x = lt.tensor{{1.0, 2.0, 3.0, 5.0}}
net(x) lost(x)
local sgd, gone = lt.optim.sgd(net, {lr = 2.0 ^ -38}), lt.optim.sgd(lost, {lr = 1.0})
gone = nil
collectgarbage() collectgarbage()
for step = 1, 3 do
  if step == 1 then
    local scaler = lt.amp.scaler{}
    ;(net(x):sum() * 2.0 ^ -30):backward()
    sgd:zero_grad()
    scaler:close()
  end
  lost:zero_grad()
  ;((net(x):sum() + lost(x):sum() * 2.0 ^ 9) * 2.0 ^ 30):backward()
  sgd:step()
end
print(net:sha256(), lost.w.grad:max():item())
]]

T.test("an fp16 wire keeps all gradients exact", function()
  local wanted = run(CHANGES, "")
  assert(wanted:find("\t2748779069440.0\n", 1, true), wanted)                        -- 5 * 2^39
  T.equal(run(CHANGES, "--ranks 2 --wire fp16"), wanted)
end)

-- The gradient of `small` barely fits into fp16 beside that of `large`, which changes in each step.
-- So the bits that are left of it depend on the wire scale of their bucket.
local RUN = [[
local lt = require "luatrain"
local large, small = lt.nn.linear{4, 2}, lt.nn.linear{4, 2}
local net = lt.nn.sequential{large, small}
local optim = lt.optim.sgd(net, {lr = 1.0})
local train = lt.data.open "synthetic:2x2x1/2/48"
local run <close> = lt.run{net = net, optim = optim, train = train, epochs = 1, batch = 8,
                           out = "run"}
for _ in run:epochs() do
  for x in run:batches() do
    x = x:reshape{-1, 4}
    run:step(function()
      local loss = large(x):sum() * 2.0 ^ (5 * (run.steps % 3)) + small(x):sum() * 2.0 ^ -14 / 3
      loss:backward()
      optim:step()
      return loss
    end)
  end
end
print(net:sha256())
]]

T.test("a resumed run with an fp16 wire is bit-identical", function()
  local options = "--quiet --ranks 2 --threads 1 --wire fp16 "
  local function go(out, more) return T.ends(out, options .. more .. " t.lua", 0, "") end
  local whole, parts = T.folder(RUN), T.folder(RUN)
  local wanted = go(whole, "")
  for step = 1, 5 do go(parts, "--max-steps " .. step) end
  T.equal(go(parts, ""), wanted)
end)

T.finish()
