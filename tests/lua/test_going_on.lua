-- test_going_on.lua - runs in fp16: what people are told of skipped steps; options that found no run.
local lt = require "luatrain"
local T = require "lt_test"

-- In step `at` of a run the loss is multiplied by 1e35, which no scale can help; policy "off": the
-- loss is not scaled.
local SCRIPT = [[
local lt = require "luatrain"
local opt = lt.args{policy = "adaptive", scale = 65536.0, interval = 2000, at = 0, epochs = 2}
local train, test = lt.data.open "synthetic:6x6x1/3/48"
local net = lt.nn.sequential{lt.nn.conv2d{1, 4, 3}, lt.nn.relu(), lt.nn.flatten(),
                             lt.nn.linear{64, 3}}
local n = 0
lt.fit{net = net, train = train, test = test, epochs = opt.epochs, batch = 8, out = "run",
       optim = lt.optim.sgd(net, {lr = 0.01}),
       loss = function(z, y)
         n = n + 1
         return lt.cross_entropy(z, y) * (n == opt.at and 1e35 or 1.0)
       end,
       scaler = opt.policy ~= "off" and {policy = opt.policy, scale = opt.scale,
                                         growth_interval = opt.interval}}
]]

local function new_folder()
  local out = T.folder()
  T.write(out .. "/t.lua", SCRIPT)
  return out
end

-- Runs the script, which ends with exit code 0. Returns what it has said.
local function run(out, options, arguments)
  local text, code = T.run(out, ("--threads 1 %s t.lua %s"):format(options, arguments or ""))
  if code ~= 0 then error(text, 2) end
  return text
end

-- ==== What people are told =======================================================================

T.test("skipped steps are in the lines of epochs and in the last one", function()
  local out = new_folder()
  local text = run(out, "--amp fp16", "--policy static --at 8")
  local one, two, done = text:match "(epoch 1/2  loss.-)\n.-(epoch 2/2  loss.-)\n(.-)\n"
  assert(not one:find "skipped", text)
  assert(two:find "  test loss [%d.]+  1 of 12 steps was skipped  [%d,.]+ img/s  ", text)
  assert(done:find "^done after %d+ s, 1 of 12 steps was skipped: run has weights", text)
  text = run(new_folder(), "--amp fp16", "--policy static")
  assert(text:find "\ndone after %d+ s: run has" and not text:find "skipped", text)
end)

-- ==== Options that found no run ==================================================================

local LOOP = [[
local lt = require "luatrain"
local fc = lt.nn.linear{4, 2}
local sgd = lt.optim.sgd(fc, {lr = 0.1})
%s
for _ = 1, %d do
  fc(lt.ones{2, 4}):cast("f32"):sum():backward()
  sgd:step()
end
]]

T.test("options for a run that found none are warnings", function()
  local out = T.folder()
  local function said(options, before, steps, wanted)
    T.write(out .. "/loop.lua", LOOP:format(before, steps))
    local text, code = T.run(out, options .. " loop.lua")
    T.equal({code, text}, {0, wanted and "luatrain: warning: " .. wanted .. "\n" or ""})
  end
  local scale = "--amp fp16: without lt.run and lt.fit the script has trained %s with no loss "
                .. "scale; local scaler <close> = lt.amp.scaler{} is what its loop needs"
  said("--amp fp16", "", 3, scale:format "3 steps")
  said("--amp fp16 --ranks 2 --threads 1", "", 1, scale:format "1 step")
  said("--amp fp16", "local scaler <close> = lt.amp.scaler{}", 3)
  said("--amp fp16", "", 0)
  said("--amp bf16", "", 3)
  said("--amp off", "", 3)
  said("--amp auto", "", 0, "--amp auto is for lt.run and lt.fit; the script has called neither, "
                            .. "and all was in f32")
  said("--amp bf16 --amp-check 5", "", 3, "--amp-check 5 is for lt.run and lt.fit; the script has "
                                          .. "called neither: lt.amp.check is for its own loop")
  said("--amp bf16 --amp-check 5", "require = nil", 3)
  local text = run(new_folder(), "--quiet --amp auto", "--epochs 1")
  T.equal(text, "")
end)

T.finish()
