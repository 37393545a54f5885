-- test_pipeline_script.lua - scripts that train in a pipeline do other things too: they evaluate,
-- save and print at any time, run several backward passes, fail, or get a signal.
local T = require "lt_test"
local json = require "luatrain.json"

local SCRIPT = [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{mode = "none", norm = "batch_norm", fit = false, accumulate = 1, batch = 8,
                    epochs = 2, mixup = 0.0, sizes = false, stop_at = 0, stop_rank = 0,
                    scale = 0.0, write = "", write_rank = -1}
local mode = opt.mode
local train, test = lt.data.open("synthetic:8x8x1/4/64")
local norm = nn[opt.norm]
local net = nn.sequential{
  conv1 = nn.conv2d{1, 4, 3, pad = 1, bias = false}, bn1 = norm{4}, relu1 = nn.relu(),
  conv2 = nn.conv2d{4, 6, 3, pad = 1}, bn2 = norm{6}, relu2 = nn.relu(),
  pool = nn.global_avg_pool2d(), fc1 = nn.linear{6, 8}, relu3 = nn.relu(), fc2 = nn.linear{8, 4}}

if mode == "unused" then
  local base = net
  local parts = {base = base, never = nn.linear{3, 3}}
  net = nn.module(parts, function(self, x) return self.base(x) end)
elseif mode == "shared" or mode == "twice_used" then
  local parts = {a = nn.conv2d{1, 1, 3, pad = 1}, b = nn.conv2d{1, 1, 3, pad = 1},
                 c = nn.linear{64, 4}}
  net = nn.module(parts, function(self, x)
    local a = self.a(x)
    local b = self.b(a)
    return self.c((mode == "shared" and self.a(b) or b + self.a(a)):reshape{x:dim(1), 64})
  end)
elseif mode == "probe" then
  local parts = {body = net, head = nn.linear{4, 4}, probe = nn.linear{4, 4}}
  net = nn.module(parts, function(self, x)
    local h = self.body(x)
    return self.head(h) + self.probe(h:detach()) * h:to("cpu")
  end)
end
local sgd = lt.optim.sgd(net, {lr = 0.05})

local function write(at)
  if at ~= opt.write or opt.write_rank >= 0 and opt.write_rank ~= lt.rank() then return end
  net.fc2.w:fill(0)
  net.fc2.b:set(1, 0.5)
  net.conv1.w:copy(lt.ones{4, 3, 3, 1})
end
write "before"

if mode == "root_save" then
  lt.on_root(function() lt.save("root.lt", net) end)
elseif mode == "root_sha256" then
  lt.on_root(function() return net:sha256() end)
elseif mode == "root_write" then
  lt.on_root(function() net.fc2.b:fill(1) end)
elseif mode == "root_get" then
  lt.on_root(function() return net.fc2.b:get(1) end)
elseif mode == "reads" then
  lt.on_root(function() print(net.conv1.w, net.fc2.b, lt.tensor{1, 2}:sum():item()) end)
  print(net.conv1.w, net.fc2.b)
  print(net:sha256(), net.fc2.b:get(1), net.conv1.w:get(1, 1, 1, 1), #net.fc2.w:totable())
  lt.save("all.lt", net)
elseif mode == "load" then
  net:load("all.lt")
end

if opt.fit then
  lt.fit{net = net, optim = sgd, train = train, test = test, epochs = opt.epochs, out = "run",
         batch = opt.batch, accumulate = opt.accumulate, mixup = opt.mixup,
         sizes = opt.sizes and {{epochs = 1, size = 6}, {size = 8, batch = 24}} or nil,
         scaler = opt.scale > 0 and {policy = "dynamic", scale = opt.scale, growth_interval = 3}
                  or nil}
  return
end

local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = opt.epochs,
                           batch = opt.batch, out = "run"}
write "start"
if mode == "evaluates" then run:evaluate(test) end
local count = 0
for epoch in run:epochs() do
  for x, y in run:batches() do
    run:step(function()
      local loss = lt.cross_entropy(net(x), y)
      if mode == "twice" then
        (loss * 0.5):backward()
        loss = lt.cross_entropy(net(x), y) * 0.5
      end
      loss:backward()
      if mode == "grad" then print(net.fc2.w.grad, net.conv1.w.grad) end
      sgd:step()
      return loss
    end)
    count = count + 1
    if mode == "evaluates" and count % 3 == 0 then run:evaluate(test) end
    if mode == "saves" then run:save() end
    if mode == "fails" and epoch == 2 and lt.rank() == 1 then error "no more" end
    if count == opt.stop_at and lt.rank() == opt.stop_rank then os.execute "kill -TERM $PPID" end
  end
  if mode == "saves" then lt.save("epoch.lt", net) end
  local half = {name = "half", count = function(_, labels) return labels:dim(1) / 2 end}
  local result = run:evaluate(test, {metrics = {lt.metrics.top1, half}})
  if mode == "metrics" then print(result.half) end
  write "evaluation"
  run:report(result)
end
]]

local folder = T.folder(SCRIPT)
local PIPE = "--ranks 2 --parallel pipe=2,micro=4,cut=fc1"

-- Runs the script, and checks its exit code and what it prints. Returns that.
local function fails(options, arguments, code, message)
  os.execute("rm -rf " .. folder .. "/run")
  return T.ends(folder, ("--quiet --threads 1 --seed 5 --timeout 20 %s t.lua %s")
                        :format(options, arguments or ""), code, message)
end

-- Checks that the script ends well. Returns what it prints and the digest of the weights.
local function passes(options, arguments)
  return fails(options, arguments, 0, ""), assert(T.sha(folder .. "/run"))
end

local function sha_of(options, arguments) return select(2, passes(options, arguments)) end

T.test("evaluating and saving between micro-batches changes nothing", function()
  for _, pipe in ipairs(T.cases({PIPE, PIPE .. ",schedule=gpipe", PIPE .. ",lag=0,schedule=1f1b"},
                                {PIPE})) do
    local plain = sha_of(pipe)
    T.equal(sha_of(pipe, "--mode evaluates"), plain)
    T.equal(sha_of(pipe, "--mode saves"), plain)
  end
end)

T.test("a net is read, printed and saved before the training, and loaded again", function()
  local line = "%x+\t[%d.-]+\t[%d.-]+\t%d+\n"      -- the digest and some numbers
  local alone = passes("", "--mode reads")
  local one = T.read(folder .. "/all.lt")
  local text = passes(PIPE, "--mode reads")
  T.equal(T.read(folder .. "/all.lt"), one)
  T.equal(text:match(line), assert(alone:match(line)))
  assert(text:find("tensor 4 f32 of another pipeline stage", 1, true), text)
  T.equal(sha_of(PIPE, "--mode load"), sha_of(PIPE))
end)

T.test("rank 0 alone cannot read, write or save the net", function()
  fails(PIPE, "--mode root_save", 1, "saving requires all ranks, but lt.on_root runs")
  fails(PIPE, "--mode root_sha256", 1, "sha256 requires all ranks, but lt.on_root runs")
  fails(PIPE, "--mode root_write", 1,
        "t.lua:48: in a pipeline, writing to a tensor of the net requires all ranks")
  fails(PIPE, "--mode root_get", 1, "requires all ranks, but lt.on_root runs on rank 0 only")
end)

T.test("all ranks write to the net, or the write of one is an error", function()
  for _, at in ipairs(T.cases({"before", "start", "evaluation"}, {"evaluation"})) do
    local flags = "--write " .. at
    T.equal(sha_of(PIPE, flags), sha_of("--ranks 1 --parallel pipe=1,micro=4", flags))
    local text = "writes to tensors of stage %d, which all ranks must make: rank 0 has '%s', "
                 .. "rank 1 has '%s'"
    fails(PIPE, flags .. " --write_rank 0", 9, text:format(1, "2, the last at t.lua:38", "none"))
    fails(PIPE, flags .. " --write_rank 1", 9, text:format(0, "none", "1, the last at t.lua:39"))
  end
end)

T.test("a step may call backward twice", function()
  local wanted = sha_of("--ranks 1 --parallel pipe=1,micro=4", "--mode twice")
  for _, schedule in ipairs(T.cases({"zb", "1f1b", "gpipe"}, {"zb"})) do
    T.equal(sha_of(PIPE .. ",schedule=" .. schedule, "--mode twice"), wanted)
  end
end)

T.test("a gradient of another stage cannot be read", function()
  fails(PIPE, "--mode grad", 1, "only another stage of the pipeline has the gradient of this")
end)

T.test("a metric that returns a number counts each sample once", function()
  T.equal(passes(PIPE, "--mode metrics"), "0.5\n0.5\n")
  T.equal(passes("--ranks 4 --parallel pipe=2,micro=2,cut=fc1", "--mode metrics"), "0.5\n0.5\n")
end)

T.test("an error on one stage ends all", function()
  fails(PIPE, "--mode fails", 1, "rank 1: t.lua")
end)

T.test("parameters that are never used, or used on both sides of a cut", function()
  T.equal(sha_of("--ranks 2 --parallel pipe=2,micro=4,cut=base.fc1", "--mode unused"),
          sha_of("--ranks 1 --parallel pipe=1,micro=4", "--mode unused"))
  fails("--ranks 2 --parallel pipe=2,micro=4,cut=never", "--mode unused", 2,
        "a stage cannot begin at never, which the forward pass does not use")
  for _, mode in ipairs{"shared", "twice_used"} do
    fails("--ranks 2 --parallel pipe=2,micro=4,cut=b", "--mode " .. mode, 2, "a stage cannot begin "
          .. "at b, because a parameter of an earlier stage is used again after it")
    T.equal(sha_of("--ranks 2 --parallel pipe=2,micro=4,cut=c", "--mode " .. mode),
            sha_of("--ranks 1 --parallel pipe=1,micro=4", "--mode " .. mode))
  end
end)

T.test("views and copies of a value that another stage has sent", function()
  local wanted = sha_of("--ranks 1 --parallel pipe=1,micro=4", "--mode probe")
  for _, cut in ipairs{"head", "probe", "body.conv2"} do
    T.equal(sha_of("--ranks 2 --parallel pipe=2,micro=4,cut=" .. cut, "--mode probe"), wanted)
  end
end)

T.test("sync batch norm sums over the replicas, without micro-batches", function()
  local sync = "--fit --norm sync_batch_norm"
  for _, batch in ipairs(T.cases({8, 7}, {7})) do
    local wanted = sha_of("--ranks 2", sync .. " --batch " .. batch)
    assert(wanted ~= sha_of("--ranks 2", "--fit --batch " .. batch))
    T.equal(sha_of("--ranks 4 --parallel pipe=2,micro=1,cut=conv2", sync .. " --batch " .. batch),
            wanted)
    T.equal(sha_of("--ranks 2 --parallel pipe=1,micro=1", sync .. " --batch " .. batch), wanted)
  end
  T.equal(sha_of("--ranks 2 --parallel pipe=2,micro=1,cut=fc1", sync), sha_of("", sync))
  fails(PIPE, sync, 2, "sync_batch_norm requires the whole batch at once, but the pipeline")
end)

T.test("mixup, image sizes and a dynamic loss scale", function()
  local two, four = "--ranks 2", "--ranks 4 --parallel pipe=2,micro=2,cut=fc1"
  local both = "--mixup 0.4 --sizes"
  for _, arguments in ipairs(T.cases({"--mixup 0.4", "--sizes", both}, {both})) do
    arguments = "--fit --batch 16 " .. arguments
    T.equal(sha_of(PIPE, arguments), sha_of("", arguments .. " --accumulate 4"))
    T.equal(sha_of(four, arguments), sha_of(two, arguments .. " --accumulate 2"))
  end
  -- The second scale overflows at first.
  for _, scale in ipairs(T.cases({"256", "16777216"}, {"16777216"})) do
    local arguments = "--fit --epochs 4 --scale " .. scale
    T.equal(sha_of(four .. " --amp fp16", arguments),
            sha_of(two .. " --amp fp16", arguments .. " --accumulate 2"))
    local skipped = T.read(folder .. "/run/metrics.jsonl"):match '"skipped":(%d+)'
    T.equal(skipped ~= "0", scale ~= "256")
  end
end)

T.test("small batches, many micro-batches and one step", function()
  T.equal(sha_of(PIPE, "--fit --batch 1"), sha_of("", "--fit --batch 1"))
  T.equal(sha_of("--ranks 2 --parallel pipe=2,micro=99,cut=fc1", "--fit"),
          sha_of("", "--fit --accumulate 8"))
  T.equal(sha_of(PIPE .. " --max-steps 1", "--fit"),
          sha_of("--max-steps 1", "--fit --accumulate 4"))
  T.equal(sha_of("--ranks 6 --parallel pipe=2,data=3,micro=4,cut=fc1", "--fit --batch 2"),
          sha_of("--ranks 3", "--fit --batch 2"))
end)

T.test("the planner gets options that it cannot use", function()
  fails("--ranks 9 --parallel pipe=9", "--fit", 2, "the number of stages must be from 1 to 6")
  fails("--ranks 6 --parallel pipe=2", "--fit --batch 2", 2,
        "the number of replicas must be from 1 to 2")
end)

T.test("a run that a signal stops is resumed", function()
  for _, rank in ipairs{0, 1} do
    fails(PIPE, "--stop_at 23 --stop_rank " .. rank, 75, "stopped by SIGTERM at step")
    T.ends(folder, ("--quiet --threads 1 --seed 5 %s t.lua"):format(PIPE), 0, "")
    local sha = T.sha(folder .. "/run")
    T.equal(sha, sha_of(PIPE))
  end
end)

-- Runs a script that sets no `out`. Returns the number of micro-batches in the plan of the run in
-- `out`, and the digest of its weights.
local function run_plan(out, options)
  T.ends(folder, "--quiet --threads 1 --seed 5 " .. options .. " u.lua", 0, "")
  local plan = json.read(T.read(("%s/%s/plan.json"):format(folder, out)))
  return plan.micro, T.sha(folder .. "/" .. out)
end

-- By default, there are 4 micro-batches.
T.test("a run that resumes keeps its micro-batches", function()
  T.write(folder .. "/u.lua", (T.read(folder .. "/t.lua"):gsub(', out = "run"', "")))
  local two = "--ranks 2 --parallel pipe=2,cut=fc1"
  local four = "--ranks 4 --parallel pipe=4,cut=bn1,cut=conv2,cut=fc1"
  local _, sha = run_plan("whole", two .. ",micro=3 --out whole")
  local _, other = run_plan("other", two .. " --out other")
  assert(sha and other and sha ~= other)
  local auto = "--ranks 2 --parallel pipe=auto"
  for _, second in ipairs(T.cases({"--parallel pipe=1", two, four, auto}, {two})) do
    local first = second == two and four or two
    os.execute(("cd %s; rm -rf part copy given runs"):format(folder))
    T.equal((run_plan("part", first .. ",micro=3 --max-steps 5 --out part")), 3)
    os.execute(("cd %s; mkdir -p runs/u-1; cp -r part copy; cp -r part runs/u-2"):format(folder))
    for out, options in pairs{part = "--out part --resume auto", ["runs/u-2"] = "--resume auto",
                              given = "--out given --resume copy/step-00000005.safetensors"} do
      local micro, got = run_plan(out, second .. " " .. options)
      T.equal({options, micro}, {options, 3})
      if not second:find "auto" then T.equal(got, sha) end    -- it may choose replicas
    end
  end
  T.equal((run_plan("whole", two .. " --out whole --resume never")), 4)
  T.equal((run_plan("copy", two .. ",micro=2 --out copy")), 2)
end)

T.test("a trace shows the passes of all stages", function()
  passes(PIPE .. " --trace trace.json", "--fit")
  local text = T.read(folder .. "/trace.json")
  for _, name in ipairs{"backward pass", "gradients of weights", "wait for a stage"} do
    assert(text:find('"' .. name .. '"', 1, true), name)
  end
end)

T.finish()
