-- test_plan.lua - `luatrain plan` offers the plans that its options allow, and the one that it
-- recommends can be run.
local T = require "lt_test"
local json = require "luatrain.json"

local folder = T.folder [[
local lt = require "luatrain"
local nn = lt.nn
local train, test = lt.data.open "synthetic:8x8x1/4/64"
local opt = lt.args{norm = false, batch = 16, exit = -1, when = "early", only = -1}
local net = nn.sequential{flatten = nn.flatten(), fc1 = nn.linear{64, 128},
                          norm1 = opt.norm and nn.batch_norm{128} or nn.relu(),
                          fc2 = nn.linear{128, 128}, relu2 = nn.relu(),
                          head = nn.sequential{fc3 = nn.linear{128, 4}}}
local function leave(when)
  if opt.exit >= 0 and opt.when == when and (opt.only < 0 or opt.only == lt.rank()) then
    pcall(os.exit, opt.exit)
  end
end
leave "early"
local steps = 0
lt.fit{net = net, train = train, test = test, optim = lt.optim.sgd(net, {lr = 0.1}), epochs = 1,
       batch = opt.batch, out = "run", schedule = function()
  leave(steps == 0 and "first" or "later")
  steps = steps + 1
  return 1
end}
]]

local function run(options, command)
  return T.run(folder, ("--quiet --threads 1 %s %s"):format(options, command))
end

-- Plans with a link of 1 Mbit/s. Returns the plans and what the command prints.
local function plans(options, n, arguments)
  local command = ("plan -n %d --link 0.001 t.lua %s"):format(n, arguments or "")
  local text, code = run("--ranks 2 --out plans " .. options, command)
  if code ~= 0 then error(text) end
  local found = json.read(T.read(folder .. "/plans/plans.json"))
  T.equal({#found.net.units, found.job.ranks, found.job.link.bytes_per_s},
          {arguments and 4 or 3, n, 125e3})
  return found.plans, text
end

local function refuses(options, command, message)
  T.ends(folder, ("--quiet --threads 1 %s %s"):format(options, command), 2, message)
end

local function peak_of(plan)
  local peak = 0
  for _, stage in ipairs(plan.stage) do peak = math.max(peak, stage.peak_bytes) end
  return peak
end

T.test("the fastest plan comes first, and can be run", function()
  local list, text = plans("--parallel pipe=auto", 2)
  T.equal(list[1].stages, 2)                     -- sums take longer than values on this link
  for i = 2, #list do assert(list[i].seconds >= list[i - 1].seconds * 0.999999) end
  local options = text:match "Train with: (%-%-parallel pipe=2,data=1,%S+)\n"
  T.equal(select(2, run("--ranks 2 " .. options, "t.lua")), 0)
  local ran = json.read(T.read(folder .. "/run/plan.json"))
  T.equal({ran.cuts[1], ran.micro, ran.schedule, ran.lag},
          {list[1].cuts[1], list[1].micro, list[1].schedule, list[1].lag})
end)

T.test("plans have what the options give", function()
  local list, text = plans("--parallel pipe=2,data=2,cut=head,schedule=1f1b", 4)
  assert(#list > 1)
  for _, plan in ipairs(list) do
    T.equal({plan.stages, plan.replicas, #plan.cuts, plan.cuts[1], plan.schedule},
            {2, 2, 1, "head.fc3.w", "1f1b"})
    for _, stage in ipairs(plan.stage) do
      assert(stage.exchange > 0 and stage.exposed >= 0 and stage.exposed < stage.exchange)
    end
  end
  assert(text:find "summed MB +sum s +overlap\n")
  assert(text:find " [%d.e-]+ +%d+ %%\n\n")
  assert(text:find "\nThe replicas of a stage sum its gradients during its last backward pass%.\n")
  for _, plan in ipairs(plans("--parallel pipe=2", 2, "--norm --batch 20")) do
    assert(plan.micro <= 2)                      -- batch norm gets at least 8 images
  end
  for _, plan in ipairs(plans("--parallel pipe=2", 2, "--norm --batch 3")) do
    T.equal(plan.micro, 1)
  end
  for _, plan in ipairs(plans("--parallel pipe=2,micro=99", 2)) do T.equal(plan.micro, 16) end
  for _, plan in ipairs(plans("--parallel pipe=2,data=2,micro=99", 4)) do T.equal(plan.micro, 8) end
end)

T.test("plans fit into the memory of a rank", function()
  local all, least, most = plans("--parallel pipe=auto", 2), math.huge, 0
  for _, plan in ipairs(all) do
    least, most = math.min(least, peak_of(plan)), math.max(most, peak_of(plan))
  end
  local limit = (least + most) / 2
  local list = plans(("--parallel pipe=auto,memory=%.12g"):format(limit * 1e-9), 2)
  assert(#list > 0 and #list < #all)
  for _, plan in ipairs(list) do assert(peak_of(plan) <= limit * 1.000001) end
  for _, parallel in ipairs{"pipe=auto", "pipe=2,cut=fc2", "pipe=1"} do
    for _, command in ipairs{"t.lua", "plan t.lua"} do
      refuses(("--ranks 2 --parallel %s,memory=1e-6"):format(parallel), command,
              "no plan fits into 0.001 MB per rank on 2 ranks")
    end
  end
  local _, code = run("--ranks 2 --parallel pipe=2,cut=fc2,memory=1", "t.lua")
  T.equal({code, json.read(T.read(folder .. "/run/plan.json")).cuts}, {0, {"fc2.w"}})
end)

-- A deep net: backward passes read all its results. Each rank writes its peak of memory to a file.
local deep = T.folder [[
local lt = require "luatrain"
local nn = lt.nn
local train, test = lt.data.open "synthetic:48x48x1/4/16"
local parts = {first = nn.conv2d{1, 16, 3, pad = 1}, pool = nn.global_avg_pool2d(),
               fc = nn.linear{16, 4}}
for i = 1, 11 do parts["conv" .. i] = nn.conv2d{16, 16, 3, pad = 1} end
local net = nn.module(parts, function(self, x)
  x = self.first(x)
  for i = 1, 11 do
    x = self["conv" .. i](x)
    x = x * x
  end
  return self.fc(self.pool(x))
end)
lt.fit{net = net, train = train, test = test, optim = lt.optim.sgd(net, {lr = 0.01}), epochs = 3,
       batch = 16, out = "run"}
local file <close> = io.open("peak." .. lt.rank(), "w")
file:write(lt.memory().device.peak)
]]

T.test("the planned memory is within 10 % of the peak of each stage", function()
  local one = "micro=8,schedule=1f1b,lag=2"
  for _, schedule in ipairs(T.cases({"micro=4,schedule=gpipe", one}, {one})) do
    local parallel = "--resume never --parallel pipe=2,cut=conv6,memory=1," .. schedule
    local command = "mpirun -n 2 --allow-run-as-root --oversubscribe $L --quiet --threads 1 "
    command = "export ASAN_OPTIONS=detect_leaks=0; " .. command -- MPI itself leaks
    local text, code = T.run(deep, ("; %s %s t.lua"):format(command, parallel), "true")
    if code ~= 0 then error(text) end
    for rank, stage in ipairs(json.read(T.read(deep .. "/run/plan.json")).stage) do
      local peak = tonumber(T.read(("%s/peak.%d"):format(deep, rank - 1)))
      local ratio = stage.peak_bytes / peak
      if ratio < 0.9 or ratio > 1.1 then
        error(("%s, stage %d: planned %.0f, measured %.0f"):format(schedule, rank - 1,
                                                                  stage.peak_bytes, peak))
      end
    end
  end
end)

T.test("a script that exits before a backward pass", function()
  for _, options in ipairs{"--parallel pipe=2,cut=fc2", "--parallel pipe=auto"} do
    for _, command in ipairs{"t.lua", "plan --link 1 t.lua"} do
      options = "--ranks 2 " .. options
      local text, code = run(options, command .. " --help")
      T.equal({code, select(2, text:gsub("usage: luatrain", ""))}, {0, 1})
      T.equal(select(2, run(options, command .. " --exit 0")), 0)
      T.equal(select(2, run(options, command .. " --exit 9")), 9)
    end
  end
end)

T.test("os.exit() in a profile ends the job with its code, or is refused if that is 0", function()
  local text = "t.lua:%d: the script called os.exit(%s) in the profile for --parallel pipe=P, %s"
  for _, row in ipairs{
    {"pipe=2,cut=fc2", "first", "before its first backward pass, so there is no plan"},
    {"pipe=2,cut=fc2", "early --only 1", "but only on rank 1"},
    {"pipe=2", "first --only 1", "but only on rank 1"},
    {"pipe=2", "later", "which takes several steps; use cut=NAME to train without it"},
  } do
    local mode, when, why = table.unpack(row)
    for _, exit in ipairs(T.cases({0, 3}, {3})) do
      local out, code = run("--ranks 2 --parallel " .. mode,
                            ("t.lua --exit %d --when %s"):format(exit, when))
      local wanted = text:format(11, exit > 0 and exit or "", why)
      T.equal({row, code, out:match "t%.lua.*" or out}, {row, exit > 0 and exit or 2,
                                                         wanted .. "\n"})
    end
  end
  T.equal(select(2, run("--ranks 2 --resume never --parallel pipe=2,cut=fc2",
                        "t.lua --exit 3 --when later")), 3)
end)

T.test("no variable makes a training run show plans", function()
  local text, code = T.run(folder, "--quiet --ranks 2 --parallel pipe=2,cut=fc2 t.lua",
                           "LUATRAIN_PLANS=1 ")
  T.equal({code, text:find("img/s", 1, true)}, {0, nil})
end)

T.test("invalid options", function()
  refuses("", "plan", "the script is missing")
  refuses("", "plan -n 0 t.lua", "-n must be an integer from 1 to 1024, but is '0'")
  refuses("", "plan -n 3x t.lua", "-n must be an integer from 1 to 1024, but is '3x'")
  refuses("", "plan -n", "-n requires a value")
  refuses("", "plan -m 3 t.lua", "unknown option '-m'")
  refuses("--ranks 2", "plan --link 0 t.lua", "--link must be a rate in Gbit/s, but is '0'")
  refuses("--ranks 2", "plan --link fast t.lua", "--link must be a rate in Gbit/s")
  refuses("--ranks 2 --parallel pipe=3", "plan -n 4 t.lua", "requires a multiple of 3 ranks")
  refuses("--ranks 2 --parallel pipe=2,cut=fc3", "plan t.lua",
          "no parameter or module 'fc3' (did you mean 'head.fc3'?)")
  refuses("--parallel data=2", "plan t.lua", "must have pipe=P or pipe=auto, but is 'data=2'")
  refuses("--ranks 2 --parallel pipe=2,schedule=gpipe,lag=1", "plan t.lua", "gpipe has no lag")
  refuses("--ranks 2 --parallel pipe=2,schedule=gpip", "plan t.lua",
          "schedule must be one of gpipe, 1f1b, zb, but is 'gpip'")
  refuses("--ranks 2 --parallel pipe=auto,memory=all", "plan t.lua",
          "memory must be a number of GB above 0 and at most 1e9, but is 'all'")
  refuses("--ranks 2 --parallel pipe=auto,memory=1e300", "plan t.lua",
          "memory must be a number of GB above 0 and at most 1e9, but is '1e300'")
  T.ends(folder, "--quiet plan --help", 0, "")
end)

T.finish()
