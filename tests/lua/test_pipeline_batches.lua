-- test_pipeline_batches.lua - what scripts do within and between the batches of a pipeline: steps
-- outside of a run, several steps in a batch, loops that end early, and ranks that differ.
local T = require "lt_test"

local folder = T.folder [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{accumulate = 1, updates = 1, outside = "", leave = 0, rate = 0.0, loop = false,
                    set = false, unreported = false, micro_batches = 0, unstepped = false}
local train, test = lt.data.open "synthetic:6x6x1/4/32"
local net = nn.sequential{flatten = nn.flatten(), a = nn.linear{36, 8}, relu = nn.relu(),
                          b = nn.linear{8, 4}}
local sgd = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9})
local ones, zeros = lt.full({2, 6, 6, 1}, 1.0), lt.zeros{2}:cast "u8"

local function losses_of(x, y)
  local sum, n
  for x_i, y_i, share in lt.micro_batches(opt.accumulate, x, y) do
    local loss = lt.cross_entropy(net(x_i), y_i) * share
    loss:backward()
    sum, n = sum and sum + loss:detach() or loss:detach(), (n or 0) + 1
    if n == opt.micro_batches then break end
  end
  return sum
end

local function outside(where)
  if where ~= opt.outside then return end
  for _ = 1, 3 do
    lt.step(function()
      lt.cross_entropy(net(ones), zeros):backward()
      sgd:step()
    end)
  end
end

if opt.set then
  local n = 0
  for x, y in train:batches{batch = 8, shuffle = true} do
    lt.step(function()
      losses_of(x, y)
      if not opt.unstepped then sgd:step() end
    end)
    n = n + 1
    if n == opt.leave then break end
  end
  if opt.unreported then return end
  outside "loop"
  for x, y in train:batches{batch = 8, shuffle = true, epoch = 2} do
    lt.step(losses_of, x, y)
    sgd:step()
  end
  print(net:sha256())
  return
end

outside "before"
do
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = 8,
                             out = "run"}
  for _ in run:epochs() do
    local n = 0
    for x, y in run:batches() do
      run:step(function()
        local loss
        for _ = 1, opt.updates do
          loss = losses_of(x, y)
          sgd:step()
        end
        return loss
      end)
      outside "batch"
      n = n + 1
      if opt.rate > 0 and lt.rank() == 1 then sgd.lr = opt.rate end
      if n == opt.leave then break end
    end
    outside "epoch"
    if opt.unreported then break end
    run:report()
  end
end
outside "after"
print(net:sha256())
]]

-- Runs the script. Returns the last line that it prints, and its exit code.
local function run(options, arguments)
  local words = "--quiet --threads 1 --resume never " .. options .. " t.lua " .. arguments
  local text, code = T.run(folder, words)
  return text:match "([^\n]*)\n?$", code
end

local PIPES = {"--parallel pipe=1,micro=4", "--ranks 2 --parallel pipe=2,micro=4,cut=b",
               "--ranks 2 --parallel pipe=2,micro=4,cut=b,schedule=gpipe"}

local function same(arguments)
  local wanted = run("", "--accumulate 4 " .. arguments)
  assert(#wanted == 64, wanted)
  for _, pipe in ipairs(PIPES) do T.equal({run(pipe, arguments)}, {wanted, 0}) end
end

local function refuses(arguments, code, message)
  for _, pipe in ipairs(PIPES) do
    local text, got = run(pipe, arguments)
    if got ~= code or not text:find(message, 1, true) then
      error(("expected %d: %s, got %d: %s"):format(code, message, got, text), 2)
    end
  end
end

T.test("steps before, between and after the batches of a run", function()
  for _, where in ipairs{"before", "epoch", "after"} do same("--outside " .. where) end
  same "--set --outside loop"
end)

T.test("a step between two micro-batches", function()
  refuses("--outside batch", 2, "this backward pass runs between two micro-batches of a batch")
  T.equal({run("--ranks 2 --parallel pipe=2,micro=1,cut=b", "--outside batch")},
          {run("", "--outside batch")})
end)

T.test("several updates with a batch", function()
  refuses("--updates 2", 2, "t.lua:15: in a pipeline, all backward passes of a micro-batch must "
                            .. "run before its optimizer steps, but this one follows a step; use "
                            .. "--parallel with micro=1")
  T.equal({run("--ranks 2 --parallel pipe=2,micro=1,cut=b", "--updates 2")},
          {run("", "--updates 2")})
end)

T.test("a loop that ends within a batch", function()
  refuses("--leave 3", 1, "run:report: the loop over run:batches ended after 3 of the 4 "
                          .. "micro-batches of a batch; leave it only after the last one")
  refuses("--set --leave 1", 2, "a batch begins after 1 of 4 micro-batches of the one before; do "
                                .. "not leave a loop over batches within a batch")
  refuses("--leave 3 --unreported", 1, "lt.run: the loop over run:batches ended after 3 of the 4 "
                                       .. "micro-batches of a batch; leave it only after the last")
  refuses("--set --leave 2 --unreported", 1, "the script has ended after 2 of the 4 micro-batches "
                                             .. "of a batch; leave a loop over batches only after")
  for flags, message in pairs{
    ["--leave 1"] = "run:report: the loop over run:batches ended after 1 of the 2 shards of a",
    ["--leave 1 --unreported"] = "lt.run: the loop over run:batches ended after 1 of the 2 shards",
    ["--set --leave 1"] = "a batch begins after 1 of the 2 shards of a batch; leave a loop over",
    ["--set --leave 1 --unreported"] = "the script has ended after 1 of the 2 shards of a batch",
  } do
    local text, code = run("--vranks 2 --deterministic", flags)
    assert(code == 1 and text:find(message, 1, true), text)
  end
  local wanted = run("", "--accumulate 4 --leave 2")
  for _, pipe in ipairs(PIPES) do T.equal({run(pipe, "--leave 8")}, {wanted, 0}) end
end)

T.test("a loop over lt.micro_batches that ends early", function()
  local step = " an optimizer step after 1 of the 2 micro-batches of a batch; leave a loop over "
               .. "lt.micro_batches only after the last one, and then take the optimizer's step"
  local ended = step:gsub("an optimizer step", "the script has ended")
  local begun = step:gsub("an optimizer step", "a batch begins")
  local batch = " the script has ended after 1 of the 2 %s of a batch; leave a loop over batches"
  for mode, unstepped in pairs{
    [""] = ended, ["--ranks 2"] = ended, ["--vranks 2 --deterministic"] = batch:format "shards",
    ["--ranks 2 --parallel pipe=2,micro=2,cut=b"] = batch:format "micro-batches",
    ["--ranks 2 --parallel async=asgd"] = " batches of the pass over the training set are not done",
  } do
    for flags, message in pairs{[""] = step, ["--set"] = step,
                                ["--set --leave 1 --unreported --unstepped"] = unstepped} do
      local text, code = run(mode, "--accumulate 2 --micro_batches 1 " .. flags)
      if not text:find "t%.lua:%d+: " or not text:find(message, 1, true) then
        error(("%s %s: expected %s, got %d: %s"):format(mode, flags, message, code, text))
      end
    end
  end
  local text, code = run("", "--accumulate 2 --micro_batches 1 --set --leave 2 --unstepped")
  T.equal({text:match "t.lua:%d+:(.*)$", code}, {begun, 1})
end)

T.test("a learning rate that differs between stages", function()
  T.equal({run("--ranks 2 --parallel pipe=2,micro=2,cut=b", "--rate 0.2")},
          {"luatrain: the ranks disagree: the last optimizer step: rank 0 has 'optimizer 1: lr = "
           .. "0.1', rank 1 has 'optimizer 1: lr = 0.2'", 9})
end)

T.test("batches that luatrain does not divide", function()
  T.write(folder .. "/own.lua", [[
local lt = require "luatrain"
local net = lt.nn.sequential{a = lt.nn.linear{4, 4}, b = lt.nn.linear{4, 2}}
local sgd = lt.optim.sgd(net, {lr = 0.1})
for _ = 1, 2 do
  lt.cross_entropy(net(lt.full({8, 4}, 1.0)), lt.zeros{8}:cast "u8"):backward()
  sgd:step()
end
print(net:sha256())]])
  local wanted = T.run(folder, "--quiet own.lua")
  T.equal({T.run(folder, "--quiet --ranks 2 --parallel pipe=2,micro=2,cut=b own.lua")},
          {"luatrain: a backward pass does not use a batch of set:batches or run:batches, so its "
           .. "batch is not divided into micro-batches, and the stages of the pipeline compute in "
           .. "turn\n" .. wanted, 0})
end)

-- Checks that a script prints the same in a pipeline as in one process. The start of the script is
-- given.
local function same_output(script)
  T.write(folder .. "/other.lua", [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{accumulate = 1}
local train, test = lt.data.open "synthetic:6x6x1/4/16"
]] .. script)
  local alone = "--quiet --threads 1 --resume never "
  local wanted = T.run(folder, alone .. "other.lua --accumulate 4")
  assert(wanted:find "%x+\n$", wanted)
  for _, pipe in ipairs(PIPES) do
    os.remove(folder .. "/net.safetensors")
    T.equal({T.run(folder, alone .. pipe .. " other.lua")}, {wanted, 0})
  end
end

T.test("the norm of the gradients, and a file that is loaded after it was saved", function()
  same_output [[
local net = nn.sequential{flatten = nn.flatten(), a = nn.linear{36, 8}, b = nn.linear{8, 4}}
local sgd = lt.optim.sgd(net, {lr = 0.1, clip = 0.1})
lt.fit{net = net, optim = sgd, train = train, test = test, epochs = 1, batch = 8,
       accumulate = opt.accumulate, out = "run"}
lt.save("net.safetensors", net)
for _, x in net:named_parameters() do x:fill(0.0) end
net:load "net.safetensors"
print(("%.5f %s"):format(sgd.grad_norm, net:sha256()))]]
end)

T.test("forward passes of batch norm before a run", function()
  same_output [[
local net = nn.sequential{flatten = nn.flatten(), a = nn.linear{36, 8}, bn = nn.batch_norm{8},
                          b = nn.linear{8, 4}}
local sgd = lt.optim.sgd(net, {lr = 0.1})
net(lt.full({2, 6, 6, 1}, 1.0))
lt.fit{net = net, optim = sgd, train = train, test = test, epochs = 1, batch = 8,
       accumulate = opt.accumulate, out = "run"}
print(net:sha256())]]
end)

T.finish()
