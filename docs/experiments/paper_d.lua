-- paper_d.lua - rows of tools/reproduce: the thesis on grouped pipelines, GroPipe (pipelines within
-- groups, data parallelism between them, a schedule of the learning rate). tools/reproduce.lua
-- describes the fields.
local bench = require "luatrain.commands.bench"

local add, REPRODUCED = ...           -- see tools/reproduce.lua

-- ==== Operators ==================================================================================

-- The same steps in one process and in pipelines, with the partition given by `cut`, the schedule
-- by `schedule`, and four micro-batches.
local SAME = {
  {"one process", "--ranks 1"},
  {"gpipe", "--ranks 2 --parallel pipe=2,micro=4,cut=stage2,schedule=gpipe"},
  {"1f1b", "--ranks 2 --parallel pipe=2,micro=4,cut=stage2,schedule=1f1b"},
  {"zb", "--ranks 2 --parallel pipe=2,micro=4,cut=stage2,schedule=zb"},
  {"three stages", "--ranks 3 --parallel pipe=3,micro=4,cut=stage2,cut=stage3"},
  {"two ranks", "--ranks 2"},
  {"2 x 2", "--ranks 4 --parallel pipe=2,data=2,micro=4,cut=stage2"}}

local function operator_runs()
  local list = {}
  for _, s in ipairs(SAME) do
    add(list, s[1], "{luatrain} --quiet --threads 1 --max-steps 6 --out {out} %s "
        .. "{here}/large_batch.lua --data synthetic:32x32x3/10/256 --epochs 2 --batch 32 %s", s[2],
        s[2]:find "pipe" and "" or "--accumulate 4")
  end
  return list
end

local function operator_figure(r)
  local lines, digests = {{"ResNet-20, 6 steps", "weights"}}, {}
  for i, s in ipairs(SAME) do
    digests[s[1]] = r:last(s[1], "end").weights_sha256
    lines[i + 1] = {s[1], digests[s[1]]:sub(1, 16)}
  end
  local good = digests["2 x 2"] == digests["two ranks"]
  for _, kind in ipairs{"gpipe", "1f1b", "zb", "three stages"} do
    good = good and digests[kind] == digests["one process"]
  end
  return r.table(lines), good and REPRODUCED or "not reproduced, because the weights differ"
end

-- ==== Memory =====================================================================================

-- Each process may have 1 GB of memory of its own (RLIMIT_DATA). The values, gradients and
-- velocities of ResNet-152 are 722 MB.
local LIMIT = "ulimit -d 1000000; {luatrain} %s --quiet --threads 1 --max-steps 2 --out {out} %s "
              .. "train_resnet.lua --arch resnet152 --data synthetic:224x224x3/1000/8 --batch %d"

local function memory_runs()
  local list = {}
  add(list, "one rank", LIMIT, "", "", 1)
  list[1].codes = {7}
  add(list, "two ranks", LIMIT, "launch -n 2",
      "--parallel pipe=2,micro=2,cut=stage3.12,schedule=1f1b,lag=0", 2)
  return list
end

local function memory_figure(r)
  local one = r:text "one rank":match "luatrain: [^\n]*" or "it has trained"
  return ("one rank, 1 image: %s\ntwo stages, 2 images: loss %.3f after step 2"):format(
           one, r:last("two ranks", "step").loss),
         r:code "one rank" == 7 and REPRODUCED or "not reproduced, because one rank has trained it"
end

-- ==== Accuracy ===================================================================================

-- Batch norm uses the statistics of micro-batches, so one process with micro-batches has the
-- accuracy of a pipeline, to the bit.
local MICRO = {1, 4}

local function micro_runs(full)
  local list = {}
  for seed = 0, full and 2 or 0 do
    for _, micro in ipairs(MICRO) do
      add(list, ("%d-%d"):format(micro, seed),
          "{luatrain} --quiet --seed %d --amp bf16 --out {out} {here}/large_batch.lua --data "
          .. "cifar10:{cifar10} --epochs %d --batch 128 --warmup 1 --accumulate %d",
          seed, full and 30 or 8, micro)
    end
  end
  return list
end

local function micro_figure(r)
  local whole, error_whole, whole_text = r:seeds "1"
  local parts, _, parts_text = r:seeds "4"
  return ("ResNet-20 on CIFAR-10, batch 128: whole batches %s, four micro-batches %s"):format(
    whole_text, parts_text), parts >= whole - math.max(2 * error_whole, 0.5) and REPRODUCED
    or "not reproduced, because the statistics of micro-batches cost accuracy"
end

local SCHEDULES = {"cosine_linear", "cosine", "linear", "step"}
local NETS = {
  {"lenet", "--arch lenet --data fashion-mnist --lr 0.05"},
  {"resnet20", "--arch resnet20 --data cifar10:{cifar10}"}}

local function schedule_runs(full)
  local list = {}
  for seed = 0, full and 2 or 0 do
    for _, net in ipairs(NETS) do
      for _, schedule in ipairs(SCHEDULES) do
        add(list, ("%s-%s-%d"):format(net[1], schedule, seed),
            "{luatrain} --quiet --seed %d --amp bf16 --out {out} {here}/large_batch.lua --epochs "
            .. "%d --batch 128 --warmup 1 --schedule %s %s",
            seed, full and 30 or 8, schedule, net[2])
      end
    end
  end
  return list
end

local function schedule_figure(r)
  local lines, best = {{"net", table.unpack(SCHEDULES)}}, true
  for i, net in ipairs(NETS) do
    local first
    lines[i + 1] = {net[1]}
    for _, schedule in ipairs(SCHEDULES) do
      local mean, _, text = r:seeds(net[1] .. "-" .. schedule)
      first = first or mean
      best = best and mean <= first
      table.insert(lines[i + 1], text)
    end
  end
  return r.table(lines), best and REPRODUCED
         or "not reproduced, because another schedule is at least as accurate"
end

-- ==== Speed ======================================================================================

local function efficiency_runs(full)
  local list = {}
  add(list, "pipelines", "BUILD=$(dirname {luatrain}) {tools}/bench pipeline --load "
      .. "1000 --peer {peer} --peer-schedules zb,1f1b --schedules zb,1f1b,gpipe --rounds %d --json "
      .. "{out}/result.json", full and 5 or 1)
  return list
end

local function efficiency_figure(r)
  local lines, faster = {{"net", "system", "schedule", "one", "two", "efficiency"}}, true
  for _, cell in ipairs(r:json "pipelines".cells) do
    local ours = bench.spread(cell.ours.two.zb.rates)
    for _, system in ipairs{cell.ours, cell.peer} do
      local one = bench.spread(system.one.rates)
      for _, schedule in ipairs(system.schedules) do
        local two = bench.spread(system.two[schedule].rates)
        lines[#lines + 1] = {cell.model, system.name, schedule, ("%.2f"):format(one),
                             ("%.2f"):format(two), ("%.0f %%"):format(50 * two / one)}
        faster = faster and (system == cell.ours or ours > two)
      end
    end
  end
  return "images per second of one and two processes\n\n" .. r.table(lines),
         faster and REPRODUCED or "not reproduced, because PyTorch's pipeline is faster"
end

-- ==== Hybrids ====================================================================================

-- Two stages with two replicas each. On two hosts, the replicas of a stage are on different ones,
-- so its sums cross the link.
local HYBRID = " --threads 1 --parallel pipe=2,data=2,micro=4,cut=%s,schedule=%s,lag=4 bench dist "
               .. "--ablation --steps %d --json {out}/result.json %s "
               .. "--data synthetic:224x224x3/1000 --batch %d"
local HYBRIDS = {
  {"vgg16", "stage4", "train_vgg.lua --arch vgg16", 8},
  {"resnet50", "stage3", "train_resnet.lua --arch resnet50", 16}}
local HYBRID_HERE = "{luatrain} --ranks 4"
local HYBRID_HOSTS = "{hosts} -- mpirun --allow-run-as-root -np 4 --map-by node --bind-to none "
                     .. "--host hosta:2,hostb:2 {luatrain}"

local function hybrid_runs(where)
  return function(full)
    local list = {}
    for _, net in ipairs(HYBRIDS) do
      for _, schedule in ipairs(full and {"zb", "1f1b", "gpipe"} or {"zb"}) do
        add(list, net[1] .. "-" .. schedule, "%s" .. HYBRID, where, net[2], schedule,
            full and 24 or 12, net[3], net[4])
      end
    end
    return list
  end
end

-- The way with a name.
local function way_of(ways, name)
  for _, way in ipairs(ways) do
    if way.name == name then return way end
  end
end

local function hybrid_figure(r)
  local lines, good = {{"net", "schedule", "no sums", "within the last pass", "after it",
                        "one per stage", "one per parameter", "within the next step",
                        "after / within"}}, true
  for _, net in ipairs(HYBRIDS) do
    for _, schedule in ipairs{"zb", "1f1b", "gpipe"} do
      if r.marks[net[1] .. "-" .. schedule] then
        local ways, line = r:json(net[1] .. "-" .. schedule).ways, {net[1], schedule}
        for _, name in ipairs{"no sums", "sums within the last pass", "after the last pass",
                              "one per stage", "one per parameter", "within the next step"} do
          local way = way_of(ways, name)         -- older results lack the last one
          line[#line + 1] = way and ("%.2f s"):format(way.total) or ""
        end
        local within = way_of(ways, "sums within the last pass").rounds
        local ratios = {}
        for i, seconds in ipairs(way_of(ways, "after the last pass").rounds) do
          ratios[i] = seconds / within[i]
        end
        local ratio = bench.spread(ratios)
        line[#line + 1], lines[#lines + 1] = ("%.3f"):format(ratio), line
        good = good and ratio >= (net[1] == "vgg16" and 1.1 or 0.98)
      end
    end
  end
  return "seconds per step\n\n" .. r.table(lines), good and REPRODUCED
         or "not reproduced, because the sums are a small part of a step here"
end

-- ==== Delays =====================================================================================

-- The sums of a stage are applied by its own step, or by the next one.
local DELAYED = {
  {"lenet", "--arch lenet --data fashion-mnist --lr 0.05", "fc1", {short = 4, full = 20}},
  {"resnet20", "--arch resnet20 --data cifar10:{cifar10}", "stage2", {short = 2, full = 30}}}

local function delay_runs(full)
  local list = {}
  for seed = 0, full and 2 or 0 do
    for _, net in ipairs(DELAYED) do
      for delay = 0, 1 do
        add(list, ("%s-%d-%d"):format(net[1], delay, seed),
            "{luatrain} --quiet --seed %d --amp bf16 --threads 1 --ranks 4 --parallel "
            .. "pipe=2,data=2,micro=2,cut=%s,delay=%d --out {out} {here}/large_batch.lua "
            .. "--epochs %d --batch 128 --warmup 1 %s", seed, net[3], delay,
            net[4][full and "full" or "short"], net[2])
      end
    end
  end
  return list
end

local function delay_figure(r)
  local lines, good = {{"net", "own sums", "sums of the step before"}}, true
  for i, net in ipairs(DELAYED) do
    local own, own_error, own_text = r:seeds(net[1] .. "-0")
    local delayed, _, delayed_text = r:seeds(net[1] .. "-1")
    lines[i + 1] = {net[1], own_text, delayed_text}
    good = good and delayed >= own - math.max(2 * own_error, 0.5)
  end
  return "top-1, two stages with two replicas each\n\n" .. r.table(lines), good and REPRODUCED
         or "not reproduced, because the delay costs accuracy"
end

-- ==== Plans ======================================================================================

local PLANS = {
  {"vgg16", "train_vgg.lua --arch vgg16", 64, {0.2, 0.5, 1}, 2.112, 1.309},
  {"resnet50", "train_resnet.lua --arch resnet50", 64, {0.05, 0.2, 1}, 1.596, 1.143}}

local function plan_runs()
  local list = {}
  for _, p in ipairs(PLANS) do
    for _, gbit in ipairs(p[4]) do
      add(list, ("%s-%g"):format(p[1], gbit),
          "{luatrain} --threads 1 --out {out} plan -n 8 --link %g %s --data "
          .. "synthetic:224x224x3/1000 --batch %d && cp {out}/plans.json {out}/result.json",
          gbit, p[2], p[3])
    end
  end
  return list
end

-- The highest rate among plans that fit; 0 if there are none.
local function fastest(plans, fits)
  local best = 0
  for _, plan in ipairs(plans) do
    if fits(plan) then best = math.max(best, plan.images_per_s) end
  end
  return best
end

-- How many times as fast; 0 if there is nothing to compare with.
local function gain(rate, base) return base > 0 and rate / base or 0.0 end

local function plan_figure(r)
  local lines = {{"net", "Gbit/s", "data parallelism", "one gpipe pipeline", "fastest",
                  "over data parallelism", "over gpipe"}}
  local good = true
  for _, p in ipairs(PLANS) do
    local most, most_gpipe = 0, 0
    for _, gbit in ipairs(p[4]) do
      local plans = r:json(("%s-%g"):format(p[1], gbit)).plans
      local data = fastest(plans, function(plan) return plan.stages == 1 end)
      local gpipe = fastest(plans, function(plan)
        return plan.stages == 8 and plan.schedule == "gpipe"
      end)
      local best = fastest(plans, function() return true end)
      local over_data, over_gpipe = gain(best, data), gain(best, gpipe)
      most, most_gpipe = math.max(most, over_data), math.max(most_gpipe, over_gpipe)
      lines[#lines + 1] = {p[1], ("%g"):format(gbit), ("%.2f"):format(data),
                           ("%.2f"):format(gpipe), ("%.2f"):format(best),
                           ("%.2fx"):format(over_data), ("%.2fx"):format(over_gpipe)}
    end
    good = good and most >= p[5] and most_gpipe >= p[6]
  end
  return "predicted images per second of 8 devices, each like one core of this machine\n\n"
         .. r.table(lines), good and "reproduced in simulation"
         or "not reproduced, because one of the gains is not reached with these links"
end

return {
  {name = "d-operators", minutes = {short = 1, full = 1}, runs = operator_runs,
   figure = operator_figure,
   claim = "partition, schedule and dependencies keep the results: same bits"},
  {name = "d-memory", minutes = {short = 1, full = 1}, runs = memory_runs, figure = memory_figure,
   claim = "a net that is too large for one device trains in a pipeline"},
  {name = "d-top1", minutes = {short = 14, full = 160}, runs = micro_runs, figure = micro_figure,
   claim = "pipelines do not lose top-1 accuracy"},
  {name = "d-schedule", minutes = {short = 36, full = 390}, runs = schedule_runs,
   figure = schedule_figure, claim = "a decay between cosine and linear is more accurate"},
  {name = "d-efficiency", minutes = {short = 12, full = 50}, timed = true,
   runs = efficiency_runs, figure = efficiency_figure,
   claim = "pipelines are faster than PyTorch's (torch.distributed.pipelining)"},
  {name = "d-hybrid", minutes = {short = 20, full = 90}, timed = true,
   runs = hybrid_runs(HYBRID_HERE), figure = hybrid_figure,
   claim = "sums of a stage overlap with its passes: in shared memory"},
  {name = "d-hybrid-link", minutes = {short = 40, full = 200}, timed = true,
   runs = hybrid_runs(HYBRID_HOSTS), figure = hybrid_figure,
   claim = "sums of a stage overlap with its passes: over a link"},
  {name = "d-delayed", minutes = {short = 12, full = 300}, runs = delay_runs, figure = delay_figure,
   claim = "delayed communication keeps the accuracy: a step applies the sums of the step before"},
  {name = "d-speed-up", minutes = {short = 12, full = 12}, timed = true, runs = plan_runs,
   figure = plan_figure, claim = "+59.6 % and +111.2 % over data parallelism, +14.3 % and +30.9 % "
   .. "over torchgpipe"},
  {name = "d-gpus", claim = "the same speed-ups on 8 GPUs",
   gpu = "luatrain launch -n 8 --device cuda --parallel pipe=auto train_resnet.lua --data "
         .. "images:DIR --arch resnet50 --batch 256   # and train_vgg.lua --arch vgg16"},
}
