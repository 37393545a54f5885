-- test_delay.lua - pipelines whose steps apply the sums of the step before, delay=1: the bits do
-- not depend on the stages, a run resumes exactly, and what cannot have a delay is refused.
local T = require "lt_test"
local json = require "luatrain.json"

local folder = T.folder [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{steps = 7, clip = 0.0, optim = {"sgd", "adam"}, optims = 1, epochs = 3,
                    every = 0, accumulate = 1}
local train, test = lt.data.open "synthetic:6x6x1/4/64"
local net = nn.sequential{
  conv1 = nn.conv2d{1, 4, 3, pad = 1, bias = false}, bn1 = nn.batch_norm{4}, relu1 = nn.relu(),
  conv2 = nn.conv2d{4, 6, 3, pad = 1}, relu2 = nn.relu(), flatten = nn.flatten(),
  drop = nn.dropout{0.3}, fc1 = nn.linear{216, 8}, relu3 = nn.relu(), fc2 = nn.linear{8, 4}}
local optim = lt.optim[opt.optim](net, {lr = 0.05, clip = opt.clip, weight_decay = 1e-3})
for _ = 2, opt.optims do lt.optim.sgd(net.fc2, {lr = 0.1}) end
lt.fit{net = net, optim = optim, train = train, test = test, epochs = opt.epochs, batch = 12,
       accumulate = opt.accumulate, max_steps = opt.steps, out = "run",
       save_every = opt.every > 0 and opt.every or nil,
       schedule = function(epoch) return 1 / (1 + epoch) end}
]]

local LAUNCH = "mpirun -n %d --allow-run-as-root --oversubscribe $L"

-- Runs the script on `ranks` ranks; words: more of its options and arguments.
local function ends(ranks, parallel, words, code, message)
  return T.ends(folder, ("--quiet --threads 1 --seed 5 --ranks %d --parallel %s %s"):format(
    ranks, parallel, words), code, message, "timeout 120")
end

-- Returns the losses of a run's steps, and the digest of its weights when it ended last.
local function results()
  local losses = {}
  for i, step in ipairs(T.events(folder .. "/run", "step")) do losses[i] = step.loss end
  return losses, T.sha(folder .. "/run")
end

local function run(ranks, parallel, arguments, options)
  os.execute("rm -rf " .. folder .. "/run")
  ends(ranks, parallel, ("%s t.lua %s"):format(options or "", arguments or ""), 0, "")
  return results()
end

T.test("a delay has the same bits for all stages, schedules and lags", function()
  local losses, sha = run(2, "pipe=1,data=2,micro=3,delay=1")
  assert(sha and #losses == 7)
  for _, parallel in ipairs{"cut=conv2", "cut=fc1,schedule=1f1b,lag=0", "cut=fc2,schedule=gpipe",
                            "cut=fc1,schedule=zb,lag=2"} do
    T.equal({run(4, "pipe=2,data=2,micro=3,delay=1," .. parallel)}, {losses, sha})
  end
  T.equal({run(6, "pipe=3,micro=3,cut=conv2,cut=fc2,delay=1")}, {losses, sha})
end)

T.test("a delay changes the results from the second step on", function()
  local delayed, sha = run(4, "pipe=2,data=2,micro=2,cut=fc1,delay=1")
  local usual, other = run(4, "pipe=2,data=2,micro=2,cut=fc1,delay=0")
  T.equal({delayed[1], #delayed}, {usual[1], #usual})
  assert(delayed[2] ~= usual[2] and sha ~= other)
  T.equal({run(4, "pipe=2,data=2,micro=2,cut=fc1")}, {usual, other})
end)

T.test("clipping, Adam, half precision and a half wire", function()
  for arguments, options in pairs{["--clip 0.05"] = "", ["--optim adam --clip 0.5"] = "--amp bf16",
                                  ["--optim adam"] = "--wire bf16", [""] = "--wire fp16"} do
    local losses, sha = run(2, "pipe=1,data=2,micro=2,delay=1", arguments, options)
    local got, got_sha = run(4, "pipe=2,data=2,micro=2,cut=fc1,delay=1", arguments, options)
    if options == "--wire fp16" then               -- stages have other buckets, and wire scales
      T.equal({#got, got_sha ~= nil}, {#losses, true})
    else
      T.equal({got, got_sha}, {losses, sha})
    end
  end
end)

T.test("processes have the bits of threads", function()
  local losses, sha = run(4, "pipe=2,data=2,micro=2,cut=fc1,delay=1")
  os.execute("rm -rf " .. folder .. "/run")
  T.ends(folder, ("; export ASAN_OPTIONS=detect_leaks=0; %s --quiet --threads 1 --seed 5 "
                  .. "--parallel pipe=2,data=2,micro=2,cut=fc1,delay=1 t.lua"):format(
                    LAUNCH:format(4)), 0, "", "true")
  T.equal({results()}, {losses, sha})
end)

-- ==== Checkpoints ================================================================================

T.test("a run resumes to the bit, also with other stages", function()
  local losses, sha = run(4, "pipe=2,data=2,micro=3,cut=fc1,delay=1", "--steps 99")
  assert(#losses > 12)
  for _, first in ipairs{1, 2, 6, 9} do            -- an epoch has six steps
    local arguments = ("--steps %d"):format(first)
    run(4, "pipe=2,data=2,micro=3,cut=fc1,delay=1", arguments)
    ends(6, "pipe=3,data=2,micro=3,cut=conv2,cut=fc2,delay=1", "t.lua --steps 99", 0, "")
    T.equal({results()}, {losses, sha})
    T.equal(T.warnings(folder .. "/run"), {})
  end
  run(4, "pipe=2,data=2,micro=3,cut=fc1,delay=1", "--steps 4", "--wire fp16")
  ends(4, "pipe=2,data=2,micro=3,cut=fc1,delay=1", "--wire fp16 t.lua --steps 99", 0, "")
  local _, resumed = results()
  local _, whole = run(4, "pipe=2,data=2,micro=3,cut=fc1,delay=1", "--steps 99", "--wire fp16")
  T.equal(resumed, whole)
end)

T.test("checkpoints do not change the results", function()
  local losses, sha = run(4, "pipe=2,data=2,micro=2,cut=fc1,delay=1", "--steps 99")
  T.equal({run(4, "pipe=2,data=2,micro=2,cut=fc1,delay=1", "--steps 99 --every 2")}, {losses, sha})
end)

T.test("a run that resumes with another delay warns", function()
  for was = 0, 1 do
    run(4, ("pipe=2,data=2,micro=2,cut=fc1,delay=%d"):format(was), "--steps 3")
    ends(4, ("pipe=2,data=2,micro=2,cut=fc1,delay=%d"):format(1 - was), "t.lua --steps 5", 0, "")
    T.equal(T.warnings(folder .. "/run"), {
      ("run/step-00000003.safetensors was made with delay=%d in --parallel, but now it is %d")
      :format(was, 1 - was)})
  end
end)

-- ==== Refusals ===================================================================================

local function refuses(ranks, parallel, words, message)
  os.execute("rm -rf " .. folder .. "/run")
  return ends(ranks, parallel, words, 2, message)
end

T.test("options that cannot have a delay", function()
  refuses(2, "pipe=2,cut=fc1,delay=1", "t.lua",
          "--parallel: delay=1 hides the sums over the replicas of a stage, but with 2 ranks, each "
          .. "stage of 'pipe=2,cut=fc1,delay=1' has only one; start more ranks, or remove it")
  refuses(2, "pipe=auto,delay=1", "t.lua",
          "--parallel: delay=1 requires pipe=P, because the planner may choose no pipeline")
  refuses(4, "pipe=2,data=2,delay=2", "t.lua",
          "--parallel: delay must be an integer from 0 to 1, but is '2'")
  refuses(4, "pipe=2,data=2,delay=1,delay=0", "t.lua", "--parallel: delay is given twice")
end)

T.test("a loss scale and several optimizers are refused with the line of the script", function()
  refuses(4, "pipe=2,data=2,micro=2,cut=fc1,delay=1", "--amp fp16 t.lua",
          "t.lua:12: a delay cannot be combined with a loss scale")
  refuses(4, "pipe=2,data=2,micro=2,cut=fc1,delay=1", "t.lua --optims 2",
          "t.lua:12: a delay requires that one optimizer has all parameters, but 2 "
          .. "optimizers were made; make one, or remove the delay")
end)

-- ==== Plans ======================================================================================

T.test("plans with a delay", function()
  local function plan(parallel)
    local out = T.ends(folder, ("--quiet --threads 1 --ranks 2 --out plans --parallel %s plan -n 4 "
                                .. "--link 0.001 t.lua"):format(parallel), 0, "Train with")
    return json.read(T.read(folder .. "/plans/plans.json")), out
  end
  local usual, text = plan "pipe=2,data=2,micro=2,cut=fc1,schedule=1f1b"
  local delayed, delayed_text = plan "pipe=2,data=2,micro=2,cut=fc1,schedule=1f1b,delay=1"
  assert(text:find "gradients during its last backward pass%.\n" and text:find "lag=%d\n")
  assert(delayed_text:find "gradients during the next step, which applies them%.\n"
         and delayed_text:find "lag=%d,delay=1\n")
  T.equal({usual.job.delay, delayed.job.delay, delayed.plans[1].delay}, {0, 1, 1})
  assert(delayed.plans[1].seconds < usual.plans[1].seconds)
  os.execute("rm -rf " .. folder .. "/run")
  local out = T.ends(folder, "--threads 1 --ranks 4 --parallel pipe=2,data=2,cut=fc1,delay=1 t.lua",
                     0, "replicas = 2 (sums overlap with the next step, which applies them)")
  assert(out and json.read(T.read(folder .. "/run/plan.json")).delay == 1)
end)

T.finish()
