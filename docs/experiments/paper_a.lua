-- paper_a.lua - rows of tools/reproduce: the thesis on data parallelism in PyTorch, with fused
-- gradients, mixed precision, an adaptive loss scale, local batch norm and large batches.
-- tools/reproduce.lua describes the fields.
local add, REPRODUCED = ...           -- see tools/reproduce.lua

-- ==== Fragmentation ==============================================================================

local NETS = {"resnet50", "mobilenet_v1", "vgg16"}

local function tensor_runs()
  local list = {}
  for _, net in ipairs(NETS) do
    add(list, net, "{luatrain} {here}/tensor_sizes.lua --arch %s >{out}/result.json",
        net)
  end
  return list
end

-- Gradients are fragmented if most are small, but these have few of the bytes.
local function tensor_figure(r)
  local lines, good = {{"net", "gradients", "below 64 KiB", "their share of bytes"}}, true
  for i, net in ipairs(NETS) do
    local t = r:json(net)
    good = good and t.small > 0.5 * t.tensors and t.small_bytes < 0.02 * t.bytes
    lines[i + 1] = {net, tostring(t.tensors),
                    ("%d (%.0f %%)"):format(t.small, 100 * t.small / t.tensors),
                    ("%.2f %%"):format(100 * t.small_bytes / t.bytes)}
  end
  return r.table(lines), good and REPRODUCED
         or "not reproduced, because small gradients are few, or have many of the bytes"
end

local DIST = "%s --threads 1 bench dist --ablation --steps %d --most 256 --json {out}/result.json "
             .. "train_resnet.lua --arch resnet50 --data synthetic:224x224x3/1000 --batch %d"
local HERE, HOSTS = "{luatrain} --ranks 2", "{hosts} -- {luatrain} launch -n 2 -H hosta:1,hostb:1"

local function ablation_runs(where, batch)
  return function(full)
    local list = {}
    add(list, "ablation", DIST, where, full and 24 or 6, batch)
    return list
  end
end

-- The rates of allreduces by size, and the steps sent in four ways.
local function ablation_figure(r)
  local d = r:json "ablation"
  local sizes, rates = {"allreduce"}, {"GB/s"}
  for _, s in ipairs(d.sums) do
    sizes[#sizes + 1] = s.bytes < 1 << 20 and ("%d KiB"):format(s.bytes >> 10)
                        or ("%d MiB"):format(s.bytes >> 20)
    rates[#rates + 1] = ("%.2f"):format(s.bytes / s.seconds / 1e9)
  end
  local lines, ms = {{"steps", "ms", "collectives"}}, {}
  for i, way in ipairs(d.ways) do
    ms[i] = 1e3 * way.total
    if i ~= 1 and i ~= 3 then
      lines[#lines + 1] = {way.name, ("%.1f"):format(ms[i]), tostring(way.collectives)}
    end
  end
  -- 2: fused and overlapped; 4: fused, after backward; 6: per tensor, after backward
  local gain = ms[6] / ms[2]
  local verdict = gain >= 1.02 and REPRODUCED
                  or "not reproduced, because the exchange is a small part of a step here"
  return ("%s\n\n%s\n\nfused and overlapped is %.3f times as fast as per tensor after backward")
    :format(r.table{sizes, rates}, r.table(lines), gain), verdict
end

-- ==== The loss scale =============================================================================

-- LeNet with a loss that is tiny, or that jumps in every 16th batch. In f32, a tiny loss costs
-- nothing, because the learning rate compensates.
local CASES = {{"plain", ""}, {"tiny", "--factor 32"}, {"spikes", "--factor 12 --spike 44"}}
local SCALES = {
  {"f32", "off", ""}, {"adaptive", "fp16", ""}, {"dynamic", "fp16", "--policy dynamic"},
  {"static", "fp16", "--policy static"}, {"static24", "fp16", "--policy static --scale 16777216"}}

local function scaler_runs(full)
  local list = {}
  for seed = 0, full and 2 or 0 do
    for _, case in ipairs(CASES) do
      for _, scale in ipairs(SCALES) do
        add(list, ("%s-%s-%d"):format(case[1], scale[1], seed),
            "{luatrain} --quiet --seed %d --amp %s --out {out} {here}/spikes.lua --epochs %d %s %s",
            seed, scale[2], full and 4 or 1, case[2], scale[3])
        list[#list].codes = {6}
      end
    end
  end
  return list
end

-- The adaptive scale must be as accurate as f32 in all cases, and each of the others fail in one.
local function scaler_verdict(top1)
  for _, scale in ipairs(SCALES) do
    local lost = 0.0
    for _, case in ipairs(CASES) do
      lost = math.max(lost, top1[case[1] .. "-f32"] - top1[case[1] .. "-" .. scale[1]])
    end
    if scale[1] == "adaptive" and lost > 1 then
      return ("not reproduced, because the adaptive scale loses %.2f points"):format(lost)
    elseif scale[2] == "fp16" and scale[1] ~= "adaptive" and lost < 2 then
      return ("not reproduced, because %s loses at most %.2f points"):format(scale[1], lost)
    end
  end
  return REPRODUCED
end

local function scaler_figure(r)
  local lines, top1 = {{"loss", "scale", "top-1", "skipped steps", "last scale"}}, {}
  for _, case in ipairs(CASES) do
    for _, scale in ipairs(SCALES) do
      local name = case[1] .. "-" .. scale[1]
      local step = r:last(name .. "-0", "step")
      local mean, _, text = r:seeds(name)
      top1[name] = mean
      lines[#lines + 1] = {
        case[1], scale[1], text, step.scale and tostring(step.skipped) or "",
        step.scale and ("2^%d"):format(math.log(step.scale, 2)) or ""}
    end
  end
  return r.table(lines), scaler_verdict(top1)
end

-- ==== Batch norm =================================================================================

-- Nets for images of 32 x 32 and their numbers of norms. The images of a step are few, so that the
-- time of the exchange shows.
local DEPTHS = {{"resnet20", 21}, {"resnet32", 33}, {"resnet44", 45}, {"resnet56", 57}}

local function norm_runs(where)
  return function(full)
    local list = {}
    for _, net in ipairs(DEPTHS) do
      for _, kind in ipairs{"local", "global"} do
        add(list, net[1] .. "-" .. kind,
            "%s --threads 1 bench dist --steps %d --most 1 --json {out}/result.json "
            .. "train_resnet.lua --arch %s --data synthetic:32x32x3/10 --batch 16 %s",
            where, full and 120 or 30, net[1], kind == "global" and "--sync-bn" or "")
      end
    end
    return list
  end
end

local function norm_figure(r)
  local lines, gains = {{"net", "norms", "local ms", "global ms", "global / local"}}, {}
  for i, net in ipairs(DEPTHS) do
    local at = r:json(net[1] .. "-local").ways[2].total
    local all = r:json(net[1] .. "-global").ways[2].total
    gains[i] = all - at
    lines[i + 1] = {net[1], tostring(net[2]), ("%.2f"):format(1e3 * at),
                    ("%.2f"):format(1e3 * all), ("%.3f"):format(all / at)}
  end
  local grows = gains[1] > 0 and gains[#gains] > gains[1]
  return ("%s\n\nlocal batch norm saves %.2f ms per step with %d norms, %.2f ms with %d"):format(
    r.table(lines), 1e3 * gains[1], DEPTHS[1][2], 1e3 * gains[#gains], DEPTHS[#DEPTHS][2]),
    grows and REPRODUCED or "not reproduced, because the saving does not grow with the norms"
end

local function norm_top1_runs(full)
  local list = {}
  for seed = 0, full and 2 or 0 do
    for _, kind in ipairs{"local", "global"} do
      add(list, ("%s-%d"):format(kind, seed),
          "{luatrain} --quiet --ranks 2 --seed %d --amp bf16 --out {out} train_resnet.lua "
          .. "--data cifar10:{cifar10} --epochs %d --lr 0.1 %s",
          seed, full and 10 or 5, kind == "global" and "--sync-bn" or "")
    end
  end
  return list
end

local function norm_top1_figure(r)
  local at, error_at, at_text = r:seeds "local"
  local all, _, all_text = r:seeds "global"
  return ("ResNet-20 on CIFAR-10, 64 images per rank: local %s, global %s"):format(
    at_text, all_text), at >= all - math.max(2 * error_at, 1) and REPRODUCED
    or "not reproduced, because local batch norm costs accuracy"
end

-- ==== Large batches ==============================================================================

local RECIPE = "--label-smoothing 0.1 --mixup 0.2 --zero-init"
local BATCHES = {
  {"128", "--batch 128 --warmup 0", "batch 128, plain"},
  {"1024", "--batch 1024", "batch 1024, warm-up"},
  {"1024-recipe", "--batch 1024 --ramp exponential " .. RECIPE,
   "batch 1024, exponential warm-up, smoothing, mixup, zero-init"},
  {"128-recipe", "--batch 128 --warmup 0 " .. RECIPE, "batch 128, smoothing, mixup, zero-init"}}

local function batch_runs(full)
  local list = {}
  for seed = 0, full and 2 or 0 do
    for _, b in ipairs(BATCHES) do
      add(list, ("%s-%d"):format(b[1], seed),
          "{luatrain} --quiet --seed %d --amp bf16 --out {out} {here}/large_batch.lua "
          .. "--data cifar10:{cifar10} --epochs %d %s", seed, full and 60 or 15, b[2])
    end
  end
  return list
end

local function batch_figure(r)
  local lines, top1 = {{"ResNet-20, CIFAR-10", "top-1"}}, {}
  for i, b in ipairs(BATCHES) do
    local mean, _, text = r:seeds(b[1])
    lines[i + 1], top1[i] = {b[3], text}, mean
  end
  return r.table(lines), top1[3] >= top1[1] and REPRODUCED
         or ("not reproduced, because batch 1024 with the recipe is %.2f points below plain "
             .. "batch 128"):format(top1[1] - top1[3])
end

-- ==== Scaling ====================================================================================

-- A device of this many images per second of ResNet-50: a V100 in fp16. The profile of this machine
-- is sped up to it.
local RATES = {resnet50 = 1190, mobilenet_v1 = 2500}
local MODELS = {
  {"resnet50", "train_resnet.lua --arch resnet50"},
  {"mobilenet_v1", "train_mobilenet.lua --width 1"}}
local SIZES = {8, 32}                 -- images per rank
local LINKS = {1, 5, 10, 25, 50, 100} -- Gbit/s

local function scaling_runs(full)
  local list = {}
  for _, m in ipairs(MODELS) do
    for _, size in ipairs(SIZES) do
      add(list, ("%s-%d"):format(m[1], size),
          "{luatrain} --ranks 2 --threads 1 --wire fp16 bench dist --steps %d --most 1 --json "
          .. "{out}/result.json %s --data synthetic:224x224x3/1000 --batch %d",
          full and 24 or 6, m[2], 2 * size)
    end
  end
  return list
end

-- The efficiency of n ranks, in percent, if devices compute `rate` images per second of a profile d
-- and the links have this many Gbit/s, with gradients in fp16 and a latency of 30 us.
local function efficiency(d, n, rate, gbit)
  local predict = require "luatrain.commands.bench_dist".predict
  local apart, buckets = d.ways[1], {}
  local faster = rate * apart.total / (d.batch / d.ranks)
  local scaled = {total = apart.total / faster, backward = apart.backward / faster}
  for i, b in ipairs(d.buckets) do buckets[i] = {bytes = b.bytes, ready = b.ready / faster} end
  local link = {alpha = 30e-6, beta = 0.5 * 8 / (1e9 * gbit)}
  return 100 * scaled.total / predict(n, link, scaled, buckets)
end

-- The efficiency of row.ranks devices, and whether it reaches row.percent with one of the links.
local function scaling_figure(r, row)
  local head, lines, reached = {"net, images per rank"}, {}, false
  for i, gbit in ipairs(LINKS) do head[i + 1] = ("%g Gbit/s"):format(gbit) end
  lines[1] = head
  for _, m in ipairs(MODELS) do
    for _, size in ipairs(SIZES) do
      local d, line = r:json(("%s-%d"):format(m[1], size)), {("%s, %d"):format(m[1], size)}
      for i, gbit in ipairs(LINKS) do
        local percent = efficiency(d, row.ranks, RATES[m[1]], gbit)
        line[i + 1], reached = ("%.1f %%"):format(percent), reached or percent >= row.percent
      end
      lines[#lines + 1] = line
    end
  end
  return ("efficiency of %d devices of %d (ResNet-50) or %d (MobileNet) images/s, by link\n\n%s")
    :format(row.ranks, RATES.resnet50, RATES.mobilenet_v1, r.table(lines)),
    reached and "reproduced in simulation" or
    ("not reproduced, because no link of up to %d Gbit/s reaches %.1f %%"):format(
      LINKS[#LINKS], row.percent)
end

return {
  {name = "a-tensors", minutes = {short = 1, full = 1}, runs = tensor_runs, figure = tensor_figure,
   claim = "gradients are fragmented"},
  {name = "a-fragmentation", minutes = {short = 4, full = 12}, timed = true,
   runs = ablation_runs(HERE, 16), figure = ablation_figure,
   claim = "fused, overlapped gradients are faster: in shared memory"},
  {name = "a-fragmentation-link", minutes = {short = 6, full = 16}, timed = true,
   runs = ablation_runs(HOSTS, 8), figure = ablation_figure,
   claim = "fused, overlapped gradients are faster: over a link"},
  {name = "a-scaler", minutes = {short = 5, full = 48}, runs = scaler_runs, figure = scaler_figure,
   claim = "an adaptive loss scale trains where others fail"},
  {name = "a-batch-norm", minutes = {short = 6, full = 20}, timed = true, runs = norm_runs(HERE),
   figure = norm_figure, claim = "local batch norm saves more with more norms: in shared memory"},
  {name = "a-batch-norm-link", minutes = {short = 6, full = 20}, timed = true,
   runs = norm_runs(HOSTS), figure = norm_figure,
   claim = "local batch norm saves more with more norms: over a link"},
  {name = "a-batch-norm-top1", minutes = {short = 9, full = 54},
   runs = norm_top1_runs, figure = norm_top1_figure,
   claim = "local batch norm keeps the accuracy"},
  {name = "a-large-batch", minutes = {short = 55, full = 660},
   runs = batch_runs, figure = batch_figure,
   claim = "a large batch with the recipe is at least as accurate as the baseline"},
  {name = "a-scaling", minutes = {short = 12, full = 36}, timed = true, runs = scaling_runs,
   figure = scaling_figure, ranks = 32, percent = 99.4, claim = "99.4 % efficiency on 32 GPUs"},
  {name = "a-tensor-cores", claim = "mixed precision is 1.71 times as fast with Tensor Cores",
   gpu = "tools/gpu_bench --models resnet50,mobilenet_v1 --dtypes fp16,f32"},
  {name = "a-imagenet", claim = "ResNet-50 reaches 78.06 %, MobileNet-v1 73.48 % in 1 h 37 min",
   gpu = "luatrain launch -n 32 --hostfile FILE --device cuda --amp fp16 train_recipe.lua --data "
         .. "images:DIR --recipe resnet50_78   # and --recipe mobilenet_73"},
}
