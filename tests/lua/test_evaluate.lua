-- test_evaluate.lua - the loss of run:evaluate is the training's, in every mode; a result that is
-- not finite is told.
require "luatrain"
local T = require "lt_test"

-- Trains with a loss other than cross entropy. --give: lt.run gets it. --entropy: the step calls
-- cross entropy. --spoil: the test images are nan. --show: ranks other than 0 print the result.
local SCRIPT = [[
local lt = require "luatrain"
local opt = lt.args{give = false, entropy = false, spoil = false, show = false}
local train, test = lt.data.open "synthetic:6x6x1/3/48"
if opt.spoil then
  test = lt.data.set{images = lt.full({6, 6, 6, 1}, 0/0), labels = lt.zeros({6}, {dtype = "i64"}),
                     classes = 3}
end
local net = lt.nn.sequential{a = lt.nn.flatten(), b = lt.nn.linear{36, 5}, c = lt.nn.linear{5, 3}}
local sgd = lt.optim.sgd(net, {lr = 0.01})
local function squares(z) return (z * z):mean() end
local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = 8,
                           loss = opt.give and squares or nil}
for _ in run:epochs() do
  for x, y in run:batches() do
    run:step(function()
      local z = net(x)
      local loss = opt.entropy and lt.cross_entropy(z, y, 0.1) or squares(z)
      loss:backward()
      sgd:step()
      return loss
    end)
  end
  local result = run:evaluate(test)
  if opt.show and lt.rank() > 0 then print(("%.3f"):format(result.cross_entropy)) end
  run:report(result)
end
]]

local TOLD = "luatrain: warning: run:evaluate: the training step does not call lt.cross_entropy, "
             .. "so the result has cross_entropy instead of loss; give lt.run the training's loss: "
             .. "loss = function(logits, y) ... end\n"

-- Runs the script in a new folder. Returns its output, exit code and the events of its epochs.
local function run(options, flags, at)
  at = at or T.folder(SCRIPT)
  local text, code = T.run(at, ("--threads 1 --quiet --out out %s t.lua %s"):format(options, flags),
                           "timeout -k 1 60")
  return text, code, T.events(at .. "/out", "epoch"), at
end

local MODES = {"", "--ranks 2", "--ranks 2 --parallel pipe=2,micro=2,cut=c",
               "--parallel async=asgd --simulate workers=2,delay=lognormal:0.2",
               "--ranks 2 --parallel async=asgd"}

T.test("under another training loss, cross entropy is not called the loss", function()
  for i = 1, #MODES - 1 do               -- in the last one, rank 0 may have taken no step
    local mode = MODES[i]
    local text, code, epochs = run(mode, "")
    T.equal({mode, code, text, #epochs}, {mode, 0, TOLD, 2})
    for _, epoch in ipairs(epochs) do
      T.equal({mode, epoch.test_loss}, {mode, nil})
      T.near(epoch.cross_entropy, 1.1, 0.4)
    end
  end
end)

T.test("ranks that do not evaluate have a result, too", function()
  for _, mode in ipairs{"--ranks 2", "--ranks 2 --parallel async=asgd"} do
    local text, code = run(mode, "--show")
    local rest = text:gsub(TOLD:gsub("%p", "%%%0"), "")
    T.equal({mode, code, rest}, {mode, 0, ""})
  end
end)

T.test("a run that stops before an evaluation resumes with the same name", function()
  local whole = select(3, run("", ""))
  local _, code, epochs, at = run("--max-steps 6", "")
  T.equal({code, #epochs}, {0, 0})
  local text, last, resumed = run("", "", at)
  T.equal({last, text}, {0, TOLD})
  for i, epoch in ipairs(whole) do T.equal(resumed[i].cross_entropy, epoch.cross_entropy) end
end)

T.test("run:evaluate uses the loss of lt.run", function()
  for _, mode in ipairs(MODES) do
    local text, code, epochs = run(mode, "--give")
    T.equal({mode, code, text, #epochs}, {mode, 0, "", 2})
    for _, epoch in ipairs(epochs) do
      assert(epoch.test_loss < 0.5 and epoch.loss < 0.5, mode)
      T.equal(epoch.cross_entropy, nil)
    end
  end
end)

T.test("a training step that calls cross entropy has a test loss", function()
  local text, code, epochs = run("", "--entropy")
  T.equal({code, text}, {0, ""})
  T.near(epochs[2].test_loss, 1.1, 0.4)
end)

T.test("a test loss that is nan is a warning", function()
  for _, mode in ipairs{"", "--ranks 2"} do
    local text, code = run(mode, "--entropy --spoil")
    local wanted = ""
    for epoch = 1, 2 do
      wanted = wanted .. ("luatrain: warning: run:evaluate: the loss is nan in epoch %d; check the "
                          .. "data of the set\n"):format(epoch)
    end
    T.equal({mode, code, text}, {mode, 0, wanted})
  end
end)

T.finish()
