-- paper_b.lua - rows of tools/reproduce: the paper on hybrid gradient computing (a warm-up scheme
-- with linear scaling, fp16 in computing and in communication, a criterion of efficiency).
-- tools/reproduce.lua describes the fields.
local cost = require "luatrain.train.cost"

local add, REPRODUCED = ...           -- see tools/reproduce.lua

-- ==== fp16 =======================================================================================

local PRECISIONS = {{"fp32", "off"}, {"fp16", "fp16"}}

-- Short: LeNet on Fashion-MNIST; full: also ResNet-20 on CIFAR-10.
local function fp16_runs(full)
  local list = {}
  for seed = 0, 2 do
    for _, p in ipairs(PRECISIONS) do
      local form = "{luatrain} --quiet --ranks 2 --seed %d --wire %s --amp %s --out {out} "
      add(list, ("lenet-%s-%d"):format(p[1], seed), form .. "train_lenet.lua --epochs %d",
          seed, p[1], p[2], full and 6 or 3)
      if full then
        add(list, ("resnet20-%s-%d"):format(p[1], seed),
            form .. "train_resnet.lua --data cifar10:{cifar10} --epochs 10 --lr 0.1",
            seed, p[1], p[2])
      end
    end
  end
  return list
end

local function fp16_figure(r)
  local lines, good = {{"net", "precision", "top-1", "MB per step"}}, true
  for _, net in ipairs{"lenet", "resnet20"} do
    if r.marks[net .. "-fp32-0"] then
      local top1, errors, bytes = {}, {}, {}
      for i, p in ipairs(PRECISIONS) do
        local text
        local name = ("%s-%s"):format(net, p[1])
        top1[i], errors[i], text = r:seeds(name)
        bytes[i] = r:mean(name .. "-0", "wire_bytes")
        lines[#lines + 1] = {net, p[1], text, ("%.3f"):format(bytes[i] / 1e6)}
      end
      good = good and top1[2] >= top1[1] - math.max(2 * errors[1], 0.3)
             and bytes[2] < 0.55 * bytes[1]
    end
  end
  return r.table(lines), good and REPRODUCED
         or "not reproduced, because fp16 costs accuracy or does not halve the bytes"
end

-- ==== Warm-up ====================================================================================

local RAMPS = {"none", "constant", "linear", "cosine", "exponential"}
local NETS = {
  resnet20 = "--arch resnet20 --data cifar10:{cifar10} --lr 0.1",
  lenet = "--arch lenet --data fashion-mnist --lr 0.05"}

local function plan_of(full)
  if full then return {256, 512, 1024, 2048, 4096}, RAMPS, 2 end
  return {256, 1024, 4096}, {"none", "linear", "exponential"}, 0
end

local function warm_up_runs(full)
  local list, batches, ramps, last = {}, plan_of(full)
  for seed = 0, last do
    for _, net in ipairs{"lenet", "resnet20"} do
      for _, batch in ipairs(batches) do
        for _, ramp in ipairs(ramps) do
          add(list, ("%s-%d-%s-%d"):format(net, batch, ramp, seed),
              "{luatrain} --quiet --seed %d --amp bf16 --out {out} {here}/large_batch.lua --epochs "
              .. "8 --batch %d --warmup %d --ramp %s %s", seed, batch, ramp == "none" and 0 or 2,
              ramp == "none" and "linear" or ramp, NETS[net])
          list[#list].codes = {6}
        end
      end
    end
  end
  return list
end

local function warm_up_figure(r)
  local lines, sums = {{"net", "batch"}}, {}
  local full = r.marks["lenet-512-linear-0"] ~= nil
  local batches, ramps = plan_of(full)
  for i, ramp in ipairs(ramps) do lines[1][i + 2], sums[ramp] = ramp, 0.0 end
  for _, net in ipairs{"lenet", "resnet20"} do
    for _, batch in ipairs(batches) do
      local line = {net, tostring(batch)}
      for _, ramp in ipairs(ramps) do
        local top1, _, text = r:seeds(("%s-%d-%s"):format(net, batch, ramp))
        line[#line + 1], sums[ramp] = text, sums[ramp] + top1
      end
      lines[#lines + 1] = line
    end
  end
  local gain = (sums.exponential - sums.linear) / (2 * #batches)
  return ("%s\n\nexponential minus linear, mean: %+.2f points"):format(r.table(lines), gain),
         gain > 0 and REPRODUCED or "not reproduced, because the linear ramp is as accurate"
end

-- ==== Device-hours ===============================================================================

-- How many times the largest number is the smallest.
local function range(list)
  return math.max(table.unpack(list)) / math.min(table.unpack(list))
end

-- The cost of reaching the accuracy that all ways of training reach. A speed-up compares the
-- seconds per epoch. The criterion says more about the ways if their costs differ more than that.
local function hours_figure(r)
  local ways, target = {"128-0", "1024-0", "1024-recipe-0"}, 100
  for _, way in ipairs(ways) do target = math.min(target, r:top1(way)) end
  target = math.floor(target * 100) / 1e4
  local lines = {{"run of a-large-batch", "device-seconds", "epoch", "seconds per epoch"}}
  local costs, epochs = {}, {}
  for i, way in ipairs(ways) do
    local reached = cost.of(("%s/%s/metrics.jsonl"):format(r.folder, way), target).reached
    costs[i], epochs[i] = reached.device_s, reached.seconds / reached.epoch
    lines[i + 1] = {way, ("%.0f"):format(costs[i]), tostring(reached.epoch),
                    ("%.1f"):format(epochs[i])}
  end
  local all, each = range(costs), range(epochs)
  return ("device-seconds until %.2f %%\n\n%s\n\nlargest over smallest: device-seconds %.2f, "
          .. "seconds per epoch %.2f"):format(100 * target, r.table(lines), all, each),
         all > 1.1 * each and REPRODUCED
         or "not reproduced, because the costs differ no more than the seconds per epoch"
end

return {
  {name = "b-fp16", minutes = {short = 5, full = 150}, runs = fp16_runs, figure = fp16_figure,
   claim = "fp16 in computing and communication keeps the accuracy and halves the bytes"},
  {name = "b-warm-up", minutes = {short = 80, full = 1300},
   runs = warm_up_runs, figure = warm_up_figure,
   claim = "a new warm-up scheme with linear scaling is more accurate"},
  {name = "b-scaling", shares = "a-scaling", ranks = 24, percent = 97.5,
   claim = "97.5 % efficiency on 24 GPUs"},
  {name = "b-device-hours", shares = "a-large-batch", figure = hours_figure,
   claim = "device-hours compare methods better than speed-ups by more GPUs"},
  {name = "b-imagenet", claim = "ResNet-50 reaches 75.6 % in 20 minutes on 24 GPUs",
   gpu = "luatrain launch -n 24 --hostfile FILE --device cuda --amp fp16 --wire fp16 "
         .. "train_recipe.lua --recipe resnet50_fast --data images:DIR --target 0.756"},
}
