-- paper_c.lua - rows of tools/reproduce: the thesis on distributed training of scripts that do not
-- change, and on delay-compensated asynchronous training (DDC-ASGD). tools/reproduce.lua describes
-- the fields.
local add, REPRODUCED = ...           -- see tools/reproduce.lua

-- ==== The unchanged script =======================================================================

local SCRIPTS = {
  {"train_lenet", "--data synthetic:28x28x1/10/64"},
  {"train_resnet", "--data synthetic:32x32x3/10/64"},
  {"train_mobilenet", "--data synthetic:32x32x3/10/64"},
  {"train_vgg", "--data synthetic:32x32x3/10/64"},
  {"train_recipe", "--data synthetic:64x64x3/10/64 --recipe mobilenet_73 --epochs 2"}}

-- The options of luatrain for each mode; "resumed" runs in two parts.
local MODES = {
  {"one process", "{luatrain}"},
  {"threads", "{luatrain} --ranks 2"},
  {"processes", "{luatrain} launch -n 2"},
  {"deterministic", "{luatrain} --ranks 2 --deterministic --vranks 4"},
  {"pipeline", "{luatrain} --ranks 2 --parallel pipe=2,micro=2"},
  {"asynchronous", "{luatrain} --ranks 2 --parallel async=asgd"},
  {"simulated", "{luatrain} --parallel async=asgd --simulate workers=4,delay=lognormal:0.2"},
  {"bf16", "{luatrain} --amp bf16"},
  {"fp16", "{luatrain} --amp fp16"},
  {"resumed", "{luatrain}", 2}}

local function mode_runs()
  local list = {}
  for _, s in ipairs(SCRIPTS) do
    for _, mode in ipairs(MODES) do
      local form = "%s --quiet --threads 1 --max-steps %d --out {out} %s.lua --batch 16 %s"
      local command = form:format(mode[2], 4, s[1], s[2])
      if mode[3] then command = form:format(mode[2], mode[3], s[1], s[2]) .. " && " .. command end
      add(list, s[1] .. " " .. mode[1], "%s", command)
    end
  end
  return list
end

local function mode_figure(r)
  local head, lines, ran = {"script"}, {}, 0
  for i, mode in ipairs(MODES) do head[i + 1] = mode[1] end
  lines[1] = head
  for _, s in ipairs(SCRIPTS) do
    local line = {s[1]}
    for _, mode in ipairs(MODES) do
      local step = r:last(s[1] .. " " .. mode[1], "step")
      local good = step and step.step == 4 and step.loss
      line[#line + 1], ran = good and ("%.3f"):format(step.loss) or "-", ran + (good and 1 or 0)
    end
    lines[#lines + 1] = line
  end
  local all = #SCRIPTS * #MODES
  return ("the loss of step 4\n\n%s\n\n%d of %d ran"):format(r.table(lines), ran, all),
         ran == all and REPRODUCED or "not reproduced, because some scripts do not run in a mode"
end

-- ==== Asynchronous rules =========================================================================

local SPEEDS = "lognormal:0.2:1,1,1,1,2,2,3,4"
-- A message of LeNet has 1.7 MB: it takes 0.14 to 1.4 s on these links.
local LINKS = ",link=0.1,0.02,0.1,0.01,latency=1000,server=0.01:0.5"

-- The learning rates that async_runs.lua has chosen on held-out images with 4 epochs; for CIFAR-10,
-- with 16 workers.
local WORKERS = {4, 8, 16, 32}

-- {name, rule, momentum, learning rate by number of workers, or one for all}. A short experiment
-- has the first SHORT_RULES.
local SHORT_RULES = 3
local FASHION = {
  {"ddc", "ddc", 0.9, {[4] = 0.02, [8] = 0.06, [16] = 0.06, [32] = 0.02}},
  {"asgd-0", "asgd", 0, {[4] = 0.2, [8] = 0.06, [16] = 0.02, [32] = 0.02}},
  {"dc-m", "dc-m", 0.9, {[4] = 0.006, [8] = 0.006, [16] = 0.002, [32] = 0.002}},
  {"dana", "dana", 0.9, {[4] = 0.02, [8] = 0.02, [16] = 0.006, [32] = 0.002}},
  {"ormo", "ormo", 0.9, {[4] = 0.02, [8] = 0.02, [16] = 0.006, [32] = 0.006}}}
local CIFAR = {
  {"ddc", "ddc", 0.9, 0.06}, {"asgd-0", "asgd", 0, 0.02}, {"dc-m", "dc-m", 0.9, 0.002}}

local function rule_runs(rules, workers, sequential_lr, full, links, rest)
  local list, seeds = {}, full and 3 or 1
  for seed = 0, seeds - 1 do
    add(list, ("sequential-%d"):format(seed), "{luatrain} --quiet --threads 1 --seed %d --out "
        .. "{out} {here}/async.lua --test --lr %g %s", seed + 1, sequential_lr, rest)
    for k, rule in ipairs(rules) do
      if not full and k > SHORT_RULES then break end
      for _, n in ipairs(workers) do
        add(list, ("%s-%d-%d"):format(rule[1], n, seed),
            "{luatrain} --quiet --threads 1 --seed %d --parallel async=%s --simulate "
            .. "workers=%d,delay=%s%s --out {out} {here}/async.lua --test --lr %g --momentum %g %s",
            seed + 1, rule[2], n, SPEEDS, links, tonumber(rule[4]) or rule[4][n], rule[3], rest)
        list[#list].codes = {6}
      end
    end
  end
  return list
end

local function fashion_runs(full)
  return rule_runs(FASHION, WORKERS, 0.02, full, "", "--epochs " .. (full and 12 or 4))
end

local function link_runs(full)
  return rule_runs(FASHION, WORKERS, 0.02, full, LINKS, "--epochs " .. (full and 12 or 4))
end

local function cifar_runs(full)
  local list = rule_runs(CIFAR, full and WORKERS or {16}, 0.2, full, "",
                         "--data cifar10:{cifar10} --epochs " .. (full and 30 or 3))
  for _, run in ipairs(list) do run[2] = run[2]:gsub("^{luatrain}", "%0 --amp bf16") end
  return list
end

-- ddc must be better than asgd and dc-m with every number of workers.
local function rule_figure(rules)
  return function(r)
    local lines, good, lost = {{"rule"}}, true, {}
    local ran = {}
    for _, n in ipairs(WORKERS) do
      if r.marks[("ddc-%d-0"):format(n)] then
        ran[#ran + 1] = n
        lines[1][#lines[1] + 1] = n .. " workers"
      end
    end
    for i, rule in ipairs(rules) do
      if not r.marks[("%s-%d-0"):format(rule[1], ran[1])] then break end
      lines[i + 1] = {rule[1]}
      for _, n in ipairs(ran) do
        local mean, _, text = r:seeds(("%s-%d"):format(rule[1], n))
        table.insert(lines[i + 1], text)
        if i > 1 and mean >= r:seeds(("ddc-%d"):format(n)) then
          lost[#lost + 1] = ("%s with %d workers"):format(rule[1], n)
          good = good and i > 3
        end
      end
    end
    local _, _, sequential = r:seeds "sequential"
    return ("%s\n\nsequential: %s; ddc is not better than: %s"):format(
      r.table(lines), sequential, #lost > 0 and table.concat(lost, ", ") or "-"),
      good and "reproduced in simulation"
      or "not reproduced, because asgd or dc-m is as accurate with some number of workers"
  end
end

-- ==== A synchronous server =======================================================================

-- VGG-11 for small images has 39 MB of gradients. A worker computes for 0.1 s; all links have 1
-- Gbit/s, and adding a gradient takes 10 ms. The first worker is on the server's host.
local SERVER_WORKERS = {2, 4, 8, 16, 32}

local function server_runs(full)
  local list = {}
  for _, n in ipairs(SERVER_WORKERS) do
    add(list, ("server-%d"):format(n), "{luatrain} --quiet --threads 1 --max-steps %d --out {out} "
        .. "--parallel sync-server --simulate workers=%d,delay=lognormal:0:0.1,link=none%s,"
        .. "server=0.01:1 train_vgg.lua --arch vgg11 --data synthetic:32x32x3/10/640 --batch 32",
        full and 20 or 5, n, (",1"):rep(n - 1))
  end
  return list
end

-- The time of a step with a ring: 2 (n - 1) / n times the bytes in each direction, after computing.
local function server_figure(r)
  local lines, falls = {{"workers", "steps/s with the server", "with a ring", "ring / server"}}, {}
  for i, n in ipairs(SERVER_WORKERS) do
    local rate = r:last(("server-%d"):format(n), "server").steps_per_s
    local bytes = 4 * r:last(("server-%d"):format(n), "start").parameters
    local ring = 1 / (0.1 + 2 * (n - 1) / n * bytes * 8e-9)
    falls[i] = ring / rate
    lines[i + 1] = {tostring(n), ("%.3f"):format(rate), ("%.3f"):format(ring),
                    ("%.2f"):format(ring / rate)}
  end
  return r.table(lines), falls[#falls] > 2 * falls[1] and "reproduced in simulation"
         or "not reproduced, because the server is nearly as fast as a ring"
end

-- ==== The simulator ==============================================================================

-- A live run on two linked hosts, and a simulation with its times.
local SIMULATED = "{luatrain} --quiet --threads 1 --parallel async=asgd --out {out}"

local function simulator_runs(full)
  local rest = ("{here}/simulated.lua --epochs %d"):format(full and 20 or 5)
  local list = {}
  add(list, "live", "{hosts} -- {luatrain} launch -n 2 -H hosta:1,hostb:1 --quiet --threads 1 "
      .. "--parallel async=asgd --out {out} %s --sleep 0.4", rest)
  add(list, "simulated", "%s --simulate workers=2,$({luatrain} {here}/simulated.lua --times "
      .. "{out}/../live/metrics.jsonl) %s", SIMULATED, rest)
  return list
end

local function simulator_figure(r)
  local live = r:last("live", "async").steps_per_s
  local simulated = r:last("simulated", "async").steps_per_s
  local ratio = simulated / live
  return ("messages of 10.5 MB over a link of 1 Gbit/s: %.3f steps per second live, %.3f "
          .. "simulated, %+.1f %%"):format(live, simulated, 100 * (ratio - 1)),
         math.abs(ratio - 1) <= 0.1 and REPRODUCED
         or "not reproduced, because the simulation is more than 10 % off"
end

-- ==== Unequal workers ============================================================================

local LIVE = {
  {"equal", "", ""},
  {"synchronous", "LUATRAIN_FAULT=delay:rank=1:ms=100 ", ""},
  {"asynchronous", "LUATRAIN_FAULT=delay:rank=1:ms=100 ", "--parallel async=ddc"}}

local function live_runs(full)
  local list = {}
  for _, l in ipairs(LIVE) do
    add(list, l[1], "%s{luatrain} --quiet --ranks 2 --threads 1 %s --out {out} train_lenet.lua "
        .. "--epochs %d", l[2], l[3], full and 3 or 1)
  end
  return list
end

local function live_figure(r)
  local lines, rate = {{"two ranks, LeNet", "images/s", "top-1"}}, {}
  for i, l in ipairs(LIVE) do
    local last = r:last(l[1], "epoch")
    rate[i] = last.samples / last.t
    lines[i + 1] = {l[1], ("%.0f"):format(rate[i]), ("%.2f %%"):format(r:top1(l[1]))}
  end
  return ("each batch of rank 1 takes 100 ms longer, except in the first row\n\n%s"):format(
    r.table(lines)), rate[3] > 2 * rate[2] and REPRODUCED
    or "not reproduced, because asynchronous training is not twice as fast"
end

-- ==== Shares =====================================================================================

-- Two ranks on a core each. A loop beside rank 1 takes half of its core.
local SHARES = {{"equal speed", "", "true"}, {"even parts", "", "while :; do :; done"},
                {"--share auto", "--share auto", "while :; do :; done"}}

local function share_runs(full)
  local list = {}
  for _, s in ipairs(SHARES) do
    add(list, s[1], "taskset -c 1 sh -c '%s' & loop=$!; mpirun --allow-run-as-root --bind-to core "
        .. "-np 2 {luatrain} --quiet --threads 1 %s --max-steps %d --out {out} train_resnet.lua "
        .. "--data synthetic:32x32x3/10/12800 --batch 128; code=$?; kill $loop; exit $code",
        s[3], s[2], full and 300 or 100)
  end
  return list
end

-- The images per second of the last half of a run's steps.
local function rate_of(r, name)
  local list = r:steps(name)
  local first, last = list[#list // 2], list[#list]
  return (last.samples - first.samples) / (last.t - first.t)
end

local function share_figure(r)
  local lines, rate = {{"ResNet-20, two ranks", "images/s"}}, {}
  for i, s in ipairs(SHARES) do
    rate[i] = rate_of(r, s[1])
    lines[i + 1] = {s[1], ("%.0f"):format(rate[i])}
  end
  -- A rank of half the speed leaves 1.5 of 2 ranks; with even parts, it leaves 1.
  return ("rank 1 has half a core, except in the first row\n\n%s"):format(r.table(lines)),
         rate[3] > 1.15 * rate[2] and REPRODUCED
         or "not reproduced, because unequal parts are not 15 % faster"
end

-- ==== Restarts ===================================================================================

local function restart_runs(full)
  local list = {}
  add(list, "restarts", "{tools}/bench_restarts $(dirname {luatrain}) %d 20", full and 600 or 200)
  return list
end

local function restart_figure(r)
  local text = r:text "restarts":match "[^\n]*%%"
  return text, tonumber(text:match "([%d.]+) %%") >= 90 and REPRODUCED
         or "not reproduced, because less than 90 % of the throughput remains"
end

return {
  {name = "c-modes", minutes = {short = 4, full = 4}, runs = mode_runs, figure = mode_figure,
   claim = "a script for one machine trains in every mode without changes"},
  {name = "c-rules", minutes = {short = 9, full = 180}, runs = fashion_runs,
   figure = rule_figure(FASHION), claim = "DDC-ASGD beats ASGD and DC-ASGDK: Fashion-MNIST"},
  {name = "c-rules-cifar", minutes = {short = 24, full = 2340}, runs = cifar_runs,
   figure = rule_figure(CIFAR), claim = "DDC-ASGD beats ASGD and DC-ASGDK: CIFAR-10"},
  {name = "c-rules-link", minutes = {short = 9, full = 180}, runs = link_runs,
   figure = rule_figure(FASHION),
   claim = "DDC-ASGD beats ASGD and DC-ASGDK: with slow links as well"},
  {name = "c-server", minutes = {short = 1, full = 3}, runs = server_runs, figure = server_figure,
   claim = "the server is the bottleneck of synchronous training"},
  {name = "c-simulator", minutes = {short = 2, full = 6}, timed = true, runs = simulator_runs,
   figure = simulator_figure, claim = "the simulation has the step rate of a live run"},
  {name = "c-unequal", minutes = {short = 4, full = 12}, timed = true, runs = live_runs,
   figure = live_figure, claim = "asynchronous training does not wait for slow workers"},
  {name = "c-share", minutes = {short = 2, full = 5}, timed = true, runs = share_runs,
   figure = share_figure, claim = "synchronous training gives slow ranks fewer images"},
  {name = "c-restarts", minutes = {short = 7, full = 20}, timed = true, runs = restart_runs,
   figure = restart_figure, claim = "a job outlives lost ranks: two ranks, one killed every 20 s"},
}
