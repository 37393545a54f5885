-- test_scaler_ranks.lua - scalers of several ranks are alike, or that is an error.

local T = require "lt_test"

-- The differences are those of rank 1.
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
  if WHAT == "wire" then state.wire1 = 7 end
end
scaler:load(state)
print(step(), scaler.steps)
]]

local function run(what, options)
  local out = T.folder()
  T.write(out .. "/script.lua", SCRIPT)
  return T.run(out, ("--ranks 2 --threads 1 %s script.lua %s"):format(options or "", what))
end

T.test("ranks with equal scalers train", function()
  for _, wire in ipairs{"fp32", "fp16"} do
    local text, code = run("nothing", "--wire " .. wire)
    T.equal(text, "applied\t2\n")
    T.equal(code, 0)
  end
end)

T.test("scalers that are not alike are named", function()
  local scale = "the loss scale: "
  for what, message in pairs{
    policy = scale .. "rank 0 has 'policy dynamic', rank 1 has 'policy static'",
    scale = scale .. "rank 0 has 'scale 256', rank 1 has 'scale 8'",
    interval = scale .. "rank 0 has 'interval 2000', rank 1 has 'interval 7'",
    k = scale .. "rank 0 has 'scale 256', rank 1 has 'scale 8'",
    good = scale .. "rank 0 has 'good 1', rank 1 has 'good 0'",
    wire = scale .. "rank 0 has 'wire",
    one = "the loss scale",
    run = scale .. "rank 0 has 'scale 16', rank 1 has 'scale 8'",
    precision = "their precision: rank 0 has 'fp16 with a loss scale', rank 1 has 'fp16'"} do
    local is_run = what == "run" or what == "precision"
    local text, code = run(what, "--wire fp16 " .. (is_run and "--amp fp16" or ""))
    assert(text:find("the ranks disagree: " .. (what == "one" and "" or message), 1, true),
           what .. ": " .. text)
    assert(text:find(message, 1, true), what .. ": " .. text)
    T.equal(code, 9)
  end
end)

T.finish()
