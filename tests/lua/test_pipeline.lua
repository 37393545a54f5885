-- test_pipeline.lua - training in a pipeline has the bits of one process that accumulates the
-- gradients of the same micro-batches, whatever the stages, the schedule and the net.
local T = require "lt_test"

-- Nets: `plain` has batch norm and dropout; `residual` uses a value and the images in three stages;
-- `pooled` uses a value without parameters after a later stage has used it; `frozen` trains only
-- its end.
local SCRIPT = [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{net = {"plain", "residual", "pooled", "frozen"}, accumulate = 1, batch = 10,
                    steps = 7, clip = 0.0, optim = {"sgd", "adam", "lars"}, mixup = 0.0,
                    loop = false, size = 64, item = false, f64 = false, hooks = false}
local train, test = lt.data.open("synthetic:6x6x1/4/" .. opt.size)

local nets = {}
function nets.plain()
  return nn.sequential{
    conv1 = nn.conv2d{1, 4, 3, pad = 1, bias = false}, bn1 = nn.batch_norm{4}, relu1 = nn.relu(),
    conv2 = nn.conv2d{4, 6, 3, pad = 1}, bn2 = nn.batch_norm{6}, relu2 = nn.relu(),
    flatten = nn.flatten(), drop = nn.dropout{0.3},
    fc1 = nn.linear{216, 8}, relu3 = nn.relu(), fc2 = nn.linear{8, 4}}
end

function nets.residual()
  local parts = {a = nn.conv2d{1, 4, 3, pad = 1}, b = nn.conv2d{4, 4, 3, pad = 1},
                 c = nn.conv2d{4, 4, 1}, bn = nn.batch_norm{4}, fc = nn.linear{144, 4}}
  return nn.module(parts, function(self, x)
    local a = lt.relu(self.a(x))
    local sum = a + x
    local b = lt.relu(self.b(a)) + a
    local c = self.bn(self.c(b * x), a, "relu") * sum * x
    return self.fc(c:reshape{x:dim(1), 144}) + b:mean({2, 3}, false)
  end)
end

function nets.pooled()
  local parts = {a = nn.conv2d{1, 4, 3, pad = 1}, norm = nn.group_norm{2, 4},
                 b = nn.conv2d{4, 4, 3, pad = 1}, c = nn.conv2d{4, 4, 1}, fc = nn.linear{4, 4}}
  return nn.module(parts, function(self, x)
    local a = self.a(x)
    local b = lt.relu(self.b(self.norm(a))) + a
    local c = lt.global_avg_pool2d(a * a) + lt.global_avg_pool2d(self.c(b)) * a:mean{2, 3}
    return self.fc(c:reshape{x:dim(1), 4} + lt.global_avg_pool2d(a):reshape{x:dim(1), 4})
  end)
end

function nets.frozen()
  local net = nets.plain()
  net.conv1:freeze()
  net.bn1:freeze()
  return net
end

local net = nets[opt.net]()
if opt.f64 then
  net = nn.module({net = net:to "f64"}, function(self, x) return self.net(x:cast "f64") end)
end

-- Each hook halves the gradient, to which the next micro-batch adds its own.
local seen = {}
if opt.hooks then
  for name, x in net:named_parameters() do
    x:on_grad(function(grad)
      seen[name] = ("%s %a"):format(seen[name] or name, grad:cast "f64":sum():item())
      grad:copy(grad * 0.5)
    end)
  end
end
local sgd = lt.optim[opt.optim](net, {lr = 0.05, clip = opt.clip, weight_decay = 1e-3})

if opt.loop then
  for epoch = 1, 2 do
    for x, y in train:batches{batch = opt.batch, shuffle = true, epoch = epoch} do
      for x_i, y_i, share in lt.micro_batches(opt.accumulate, x, y) do
        lt.step(function() (lt.cross_entropy(net(x_i), y_i) * share):backward() end)
      end
      sgd:step()
    end
  end
  print(net:sha256())
elseif opt.item then
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = opt.batch,
                             max_steps = opt.steps, out = "run"}
  for _ in run:epochs() do
    for x, y in run:batches() do
      run:step(function()
        sgd:zero_grad()
        local loss = lt.cross_entropy(net(x), y)
        loss:backward()
        sgd:step()
        return loss:item()
      end)
    end
  end
else
  lt.fit{net = net, optim = sgd, train = train, test = test, epochs = 3, batch = opt.batch,
         accumulate = opt.accumulate, max_steps = opt.steps, mixup = opt.mixup, out = "run",
         metrics = {lt.metrics.top1, lt.metrics.top(2)}}
end
for name, text in pairs(seen) do
  local file <close> = io.open("hooks/" .. name, "a")
  file:write(text, "\n")
end
]]

local folder = T.folder(SCRIPT)

-- Returns the losses of a run's steps, and the digest of its weights when it ended last.
local function results()
  local losses = {}
  for line in io.lines(folder .. "/run/metrics.jsonl") do
    losses[#losses + 1] = line:match '"event":"step".*"loss":([^,}]*)'
  end
  return table.concat(losses, " "), T.sha(folder .. "/run")
end

local prefix = ""              -- of the commands that run the script

-- Runs the script, and returns its results().
local function run(options, arguments)
  os.execute("rm -rf " .. folder .. "/run")
  T.ends(folder, ("--quiet --threads 1 --seed 5 %s t.lua %s"):format(options, arguments), 0, "",
         prefix)
  return results()
end

local wanted = {}

-- Checks a pipeline against one process, or one process for each replica. accumulate: the number of
-- micro-batches of a step and replica.
local function check(pipe, ranks, accumulate, arguments, options)
  arguments, options = arguments or "", options or ""
  local replicas = ranks // pipe:match "%d+"
  local key = ("%d %s %s %d"):format(accumulate, arguments, options, replicas)
  local alone = replicas > 1 and ("--ranks %d %s"):format(replicas, options) or options
  wanted[key] = wanted[key]
                or {run(alone, ("--accumulate %d %s"):format(accumulate, arguments))}
  local losses, sha = run(("--ranks %d --parallel pipe=%s,micro=%d %s")
                          :format(ranks, pipe, accumulate, options), arguments)
  assert(sha and #losses > 0)
  T.equal(losses, wanted[key][1])
  T.equal(sha, wanted[key][2])
end

T.test("each number of stages and micro-batches", function()
  for _, micro in ipairs(T.cases({1, 4, 7}, {4})) do
    check("1", 1, micro)
    check("2,cut=conv2", 2, micro)
    check("3,cut=bn1,cut=fc2", 3, micro)
    check("4,cut=bn1,cut=bn2,cut=fc1", 4, micro)
  end
end)

T.test("each schedule and lag", function()
  for schedule, most in pairs{gpipe = 0, ["1f1b"] = 3, zb = 3} do
    for lag = 0, most, 3 do
      check(("3,cut=conv2,cut=fc1,schedule=%s,lag=%d"):format(schedule, lag), 3, 4)
    end
  end
end)

T.test("a residual over cuts, and a value that three stages use", function()
  for _, cuts in ipairs{"2,cut=b", "2,cut=fc", "3,cut=b,cut=fc", "4,cut=b,cut=bn,cut=fc"} do
    check(cuts, tonumber(cuts:sub(1, 1)), 3, "--net residual")
  end
end)

T.test("ops without parameters use a value after a later stage", function()
  for _, amp in ipairs(T.cases({"off", "bf16", "fp16"}, {"fp16"})) do
    for _, cuts in ipairs{"2,cut=norm", "2,cut=c", "3,cut=b,cut=fc"} do
      check(cuts, tonumber(cuts:sub(1, 1)), 2, "--net pooled", "--amp " .. amp)
    end
  end
end)

T.test("frozen layers", function()
  check("3,cut=conv2,cut=fc1", 3, 4, "--net frozen")
  check("4,cut=bn1,cut=conv2,cut=fc1", 4, 2, "--net frozen --optim adam")
end)

T.test("a last batch with fewer images than micro-batches", function()
  check("2,cut=conv2", 2, 6, "--size 23")
  check("3,cut=conv2,cut=fc2", 3, 8, "--size 21 --batch 7")
end)

T.test("clipping, and other optimizers", function()
  check("3,cut=conv2,cut=fc1", 3, 4, "--clip 0.01")
  check("3,cut=conv2,cut=fc1", 3, 4, "--optim adam --clip 0.5")
  check("2,cut=fc1", 2, 4, "--optim lars")
end)

T.test("half precision", function()
  check("2,cut=conv2", 2, 4, "", "--amp bf16")
  check("3,cut=conv2,cut=fc2", 3, 4, "", "--amp fp16")
end)

T.test("f64", function()
  for _, micro in ipairs(T.cases({1, 4, 7}, {4})) do
    check("1", 1, micro, "--f64")
    check("2,cut=net.conv2", 2, micro, "--f64")
    check("4,cut=net.bn1,cut=net.bn2,cut=net.fc1", 4, micro, "--f64")
  end
  check("2,cut=net.b", 2, 3, "--f64 --net residual --optim adam")
  check("2,data=2,cut=net.fc1", 4, 2, "--f64")
  check("3,data=2,cut=net.conv2,cut=net.fc1,schedule=gpipe", 6, 3, "--f64")
end)

T.test("clipping in f64", function()
  for ranks, cuts in pairs{[2] = "net.conv2", [3] = "net.conv2,cut=net.fc1"} do
    for _, replicas in ipairs(T.cases({1, 2}, {2})) do
      check(("%d,data=%d,cut=%s"):format(ranks, replicas, cuts), ranks * replicas, 4,
            "--f64 --steps 99 --clip 0.05")
    end
  end
end)

-- Runs the script with hooks. Returns what they have seen, a line for each stage and parameter.
local function hooked(options, arguments)
  os.execute(("rm -rf %s/hooks; mkdir %s/hooks"):format(folder, folder))
  local losses, sha = run(options, "--hooks --steps 99 " .. arguments)
  local pipe <close> = io.popen(("cat %s/hooks/*"):format(folder))
  return pipe:read "a", losses, sha
end

T.test("hooks", function()
  for arguments, cuts in pairs{[""] = "cut=conv2,cut=fc2", ["--net residual"] = "cut=b,cut=fc"} do
    local seen, losses, sha = hooked("", arguments .. " --accumulate 4")
    assert(select(2, seen:gsub("\n", "")) >= 8)
    for line in seen:gmatch "[^\n]+" do T.equal(select(2, line:gsub(" ", "")), 21 * 4) end
    for _, schedule in ipairs(T.cases({"gpipe", "1f1b", "zb"}, {"zb"})) do
      local pipe = ("--ranks 3 --parallel pipe=3,micro=4,%s,schedule=%s"):format(cuts, schedule)
      local got, got_losses, got_sha = hooked(pipe, arguments)
      T.equal(got, seen)
      T.equal(got_losses, losses)
      T.equal(got_sha, sha)
    end
  end
end)

T.test("replicas", function()
  check("1,data=2", 2, 2)
  check("2,data=2,cut=fc1", 4, 2)
  check("2,data=3,cut=conv2", 6, 2)
  check("2,data=2,cut=bn1", 4, 3, "--size 23 --clip 0.1")
  check("2,data=2,cut=conv2", 4, 4, "--optim adam", "--amp fp16")
  check("2,data=2,cut=b,schedule=1f1b,lag=0", 4, 4, "--net residual", "--amp bf16")
  check("2,data=2,cut=fc1,schedule=gpipe", 4, 3, "--clip 0.1", "--amp fp16 --wire fp16")
  check("2,data=2,cut=fc1", 4, 2, "", "--wire fp16")
end)

T.test("an accelerator, which is emulated", function()
  prefix = "LUATRAIN_DEVICE=cuda LUATRAIN_PLUGINS=$(dirname $L)/tests/cuda SHIM_OPS=reference "
           .. "LUATRAIN_CUDA_LIBS=$(dirname $L)/tests/cuda/libs"
  wanted = {}
  for _, amp in ipairs(T.cases({"off", "bf16", "fp16"}, {"fp16"})) do
    check("3,cut=conv2,cut=fc2", 3, 4, "--clip 0.01", "--amp " .. amp)
  end
  check("2,cut=conv2", 4, 2, "--size 23")
  check("2,cut=conv2,schedule=1f1b", 4, 2, "", "--amp fp16")
  check("3,cut=b,cut=fc", 3, 3, "--net residual --optim adam")
  check("2,cut=fc1", 2, 1, "--item")
  prefix, wanted = "", {}
end)

T.test("a loop without lt.run", function()
  local one = T.run(folder, "--quiet --threads 1 --seed 5 t.lua --loop --accumulate 4")
  local two = T.run(folder, "--quiet --threads 1 --seed 5 --ranks 2 --parallel "
                            .. "pipe=2,micro=4,cut=fc1 t.lua --loop")
  T.equal(#one, 65)
  T.equal(two, one)
  local both = T.run(folder, "--quiet --threads 1 --seed 5 --ranks 3 --parallel "
                             .. "pipe=3,micro=1,cut=conv2,cut=fc1 t.lua --loop --accumulate 4")
  T.equal(both, one)
end)

T.test("a step that reads its loss, and discards gradients first", function()
  local losses, sha = run("--ranks 2 --parallel pipe=2,micro=4,cut=fc1", "--item")
  local _, of_fit = run("--ranks 2 --parallel pipe=2,micro=4,cut=fc1", "")
  assert(#losses > 0)
  T.equal(sha, of_fit)
end)

T.test("a run resumes with other stages", function()
  local losses, sha = run("", "--accumulate 4 --steps 12")
  local plans = {"--ranks 2 --parallel pipe=2,micro=4,cut=fc1", "",
                 "--ranks 4 --parallel pipe=4,micro=4,cut=bn1,cut=conv2,cut=fc2"}
  for i, first in ipairs(plans) do
    local second = plans[i % #plans + 1]
    run(first, ("--accumulate %d --steps 9"):format(first == "" and 4 or 1))
    T.ends(folder, ("--quiet --threads 1 --seed 5 %s t.lua --accumulate %d --steps 12"):format(
      second, second == "" and 4 or 1), 0, "")
    local all, last = results()
    T.equal(all, losses)
    T.equal(last, sha)
  end
end)

-- Runs a script of its own on two stages, cut at net.b, and returns what rank 0 prints.
local function run_pair(text)
  T.write(folder .. "/pair.lua", [[
    local lt = require "luatrain"
    local net = lt.nn.sequential{a = lt.nn.linear{4, 4}, b = lt.nn.linear{4, 2}}
    local sgd = lt.optim.sgd(net, {lr = 0.1})
    local x, y = lt.ones{3, 4}, lt.tensor({0, 1, 0}, {dtype = "i64"})
    local function train()
      lt.step(function()
        lt.cross_entropy(net(x), y):backward()
        sgd:step()
      end)
    end
  ]] .. text)
  return T.ends(folder, "--quiet --threads 1 --timeout 5 --ranks 2 --parallel "
                        .. "pipe=2,micro=1,cut=b pair.lua", 0, "")
end

T.test("a tensor is printed by the stage that has it", function()
  local out = run_pair [[
    for _ = 1, 8 do
      train()
      local text = tostring(net.a.b) .. tostring(net.b.b)
      if lt.rank() == 0 then print(#text) end
    end
    print(net.b.b)]]
  assert(out:find("tensor 2 f32 of another pipeline stage", 1, true), out)
end)

T.test("a script may write parameters of any stage", function()
  local out = run_pair [[
    net.b.w:fill(0.5)
    net.a.b:copy(lt.ones{4})
    net.b.b:set(1, 2.0)
    train()
    print(net.b.b:get(1) > 1.5, net.a.b:get(1) > 0.5)]]
  T.equal(out, "true\ttrue\n")
end)

T.test("forward passes without a backward take no memory", function()
  local out = run_pair [[
    train()
    for _ = 1, 50 do lt.step(function() net(x) end) end
    collectgarbage()
    local before = lt.memory().live
    for _ = 1, 500 do lt.step(function() net(x) end) end
    collectgarbage()
    print(lt.memory().live - before < 20000)]]
  T.equal(out, "true\n")
end)

T.test("a script may print and save the net before training", function()
  T.equal(run_pair [[
    local text, sha = tostring(net.a.w), net:sha256()
    lt.save("pair.safetensors", net)
    train()
    print(#text > 0, #sha, net.a.w:get(1, 1) ~= nil)]], "true\t64\ttrue\n")
end)

T.test("sync_batch_norm requires the whole batch", function()
  T.write(folder .. "/sync.lua", [[
    local lt = require "luatrain"
    local nn = lt.nn
    local train, test = lt.data.open "synthetic:6x6x1/4/40"
    local net = nn.sequential{a = nn.conv2d{1, 4, 3}, bn = nn.sync_batch_norm{4},
                              flatten = nn.flatten(), b = nn.linear{64, 4}}
    lt.fit{net = net, train = train, test = test, optim = lt.optim.sgd(net, {lr = 0.1}),
           epochs = 1, batch = 8, out = "sync"}]])
  local command = "--quiet --threads 1 --resume never --ranks %d --parallel pipe=2,cut=b,micro=%d "
                  .. "sync.lua"
  T.ends(folder, command:format(2, 2), 2, "sync_batch_norm requires the whole batch at once")
  T.ends(folder, command:format(2, 1), 0, "")
  T.ends(folder, command:format(4, 1), 0, "")
end)

T.test("rank 0 alone cannot save, or compute a digest", function()
  run_pair [[
    train()
    for _, f in ipairs{function() lt.save("x.st", net) end, function() net:sha256() end} do
      local ok, why = pcall(lt.on_root, f)
      assert(ok == (lt.rank() > 0), why)
      assert(ok or tostring(why):find("requires all ranks", 1, true), why)
    end]]
end)

-- Checks the exit code and the message of a command.
local function fails(options, code, message, arguments)
  T.ends(folder, ("--quiet --threads 1 %s t.lua %s"):format(options, arguments or ""), code,
         message)
end

T.test("options that cannot be used", function()
  fails("--parallel pipe=2,cut=fc1", 2, "requires a multiple of 2 ranks, but there is 1")
  fails("--ranks 3 --parallel pipe=2,cut=fc1", 2, "requires a multiple of 2 ranks")
  fails("--ranks 2 --parallel pipe=2,data=2,cut=fc1", 2, "requires 4 ranks, but there are 2")
  fails("--ranks 2 --parallel pipe=2,cut=fc9", 2,
        "the net has no parameter or module 'fc9'")
  fails("--ranks 2 --parallel pipe=2,cut=conv1", 2, "cut=conv1 is not after the first parameter")
  fails("--ranks 3 --parallel pipe=3,cut=fc1,cut=bn1", 2, "cut=bn1 is not after cut=fc1")
  fails("--ranks 3 --parallel pipe=3,cut=fc1", 2, "pipe=3 requires 2 cuts")
  fails("--ranks 2 --parallel pipe=2,cuts=fc1", 2, "has 'cuts=fc1' (did you mean 'cut'")
  fails("--ranks 2 --parallel pipe=2,pipe=2", 2, "pipe is given twice")
  fails("--ranks 2 --parallel pipe=0,cut=fc1", 2, "pipe must be an integer from 1 to 1024")
  fails("--ranks 2 --parallel pipe=2,cut=fc1,lag=3000000000", 2, "lag must be an integer from 0")
  fails("--ranks 2 --parallel pipe=2,cut=fc1,schedule=1f2b", 2,
        "schedule must be one of gpipe, 1f1b, zb")
  fails("--ranks 2 --parallel pipe=2,cut=fc1 --amp auto", 2, "--amp auto cannot be combined")
  fails("--ranks 2 --parallel pipe=2,cut=fc1 --check-sync 2", 2, "--check-sync cannot be combined")
  fails("--ranks 2 --deterministic --parallel pipe=2,cut=fc1", 2, "--deterministic cannot be")
  fails("--ranks 2 --vranks 2 --deterministic --parallel pipe=2,cut=fc1", 2, "cannot be combined")
end)

T.test("a rank that dies, leaves or hangs is named with its stage", function()
  local pipe = "--ranks 3 --timeout 2 --parallel pipe=3,micro=4,cut=conv2,cut=fc1"
  local function check_fault(fault, code, ...)
    local text = T.ends(folder, ("--quiet --threads 1 --resume never %s t.lua"):format(pipe), code,
                        "", "LUATRAIN_FAULT=" .. fault)
    for _, part in ipairs{...} do
      assert(text:find(part, 1, true), ("%s: no '%s' in: %s"):format(fault, part, text))
    end
  end
  check_fault("leave:rank=1:step=3", 8, "rank 1, stage 1 of the pipeline, has ended")
  check_fault("leave:rank=0:step=2", 8, "rank 0, stage 0 of the pipeline, has ended")
  check_fault("hang:rank=1:step=2", 8, "waits for rank 1, stage 1", "no message for 2 s")
end)

T.finish()
