-- gpu_bench.lua - prints a table that compares whole training steps of luatrain and PyTorch on a
-- GPU. By default, it takes at most ten minutes. tools/gpu_bench runs it.
--
-- As in tools/bench, each measurement runs in its own process: ours, the peer's (eager, then
-- as a CUDA graph; or compiled), ours again; the ratio uses the mean of ours. A process runs groups
-- of steps, waits for the device only before and after each group, and reports the median. Further
-- steps time our ops and wait for the device after each op.
--
-- The most important cells come first: the first batch size of each net, then torch.compile, then
-- the other batch sizes. The last line but one is the command for those that were not reached.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"
local measure = require "measure"

local AMP = {f32 = "off", bf16 = "bf16", fp16 = "fp16"}
local COUNTS = setmetatable({}, {__index = function(_, word) return word:find "^[1-9]%d*$" end})
local MODELS = {resnet50 = true, mobilenet_v1 = true, vgg16 = true, resnet20 = true, lenet = true}

local opt = lt.args{
  device = "cuda", models = "resnet50,mobilenet_v1,vgg16", dtypes = "fp16,f32,bf16",
  batches = "256,64,512", peer = os.getenv "PEER" or "", compile = "resnet50", ops = true,
  seconds = 600.0, cell = 45.0, steps = 10, side = 0, json = "", skip = 0,
  help = {
    device = "device to measure; cpu: a dry run", models = "nets", dtypes = "precisions",
    batches = "images per step; f32 and --compile use only the first",
    peer = "a Python that has PyTorch (the variable PEER); without it, only luatrain is measured",
    compile = "which nets to compare with torch.compile, whose max-autotune takes minutes",
    ops = "print luatrain's time by ops, for the first batch and dtype",
    seconds = "time limit of the whole benchmark",
    cell = "time limit of a process; six times that for torch.compile",
    steps = "steps between two synchronizations; 1: one step in all",
    side = "side of the images; 0: the usual side of each net",
    json = "write all results to this file, after each measurement", skip = "cells to skip",
  }}

local folder, program, print = measure.folder, measure.program(), measure.print
local refuse, rate_text, memory_text = measure.refuse, measure.rate_text, measure.memory_text
local deadline = bench.clock() + opt.seconds
local IS_DRY = opt.device == "cpu" or opt.steps == 1
local OF_STEPS = IS_DRY and 0.0 or 1.5                  -- seconds of steps per process

-- ==== Measuring ==================================================================================

-- The text that the table shows for the exit code of a process.
local function why(code)
  if code == 7 then return "out of memory" end
  return ("failed (%d)"):format(code or 0)
end

local is_late = false     -- whether the deadline ended a process

-- Runs a command for at most `seconds`, and not beyond the deadline. Returns its result as
-- measure.call does, or nil, a reason, and the measurements so far.
local function call(words, options, seconds)
  local left = math.min(seconds, deadline - bench.clock()) // 1 | 0
  if left < 1 then
    is_late = true
    return nil, "no time"
  end
  local ends = bench.clock() + left
  local result, code, partial = measure.call(measure.limited(words, left), options)
  if result then return result end
  local is_over = code == 124 or code == 137 and bench.clock() >= ends
  if not is_over then return nil, why(code), partial end
  is_late = is_late or left < seconds // 1
  return nil, left < seconds // 1 and "no time" or ("over %d s"):format(left), partial
end

local net = {program, "--device", opt.device, folder .. "/bench_net.lua"}
local limits              -- the limits of the device, once measured

local function ours(cell)
  return call(net, {
    arch = cell.model, amp = AMP[cell.dtype], batch = cell.batch, seconds = OF_STEPS,
    steps = opt.steps, side = opt.side, apart = true, limits = json.text(limits),
    ["warm-up"] = 2}, opt.cell)
end

-- Measures the peer in a list of modes. Returns a table by mode: {images_per_s = , peak_bytes = },
-- or {failed = reason}, also for modes that did not run.
local function theirs(cell, modes, dtype, seconds)
  local result, reason, partial = call(measure.peer_words(opt.peer, "modes"), {
    device = opt.device, model = cell.model, dtype = dtype, batch = cell.batch, modes = modes,
    seconds = OF_STEPS, steps = opt.steps, side = opt.side,
    threads = bench.machine().threads, ["warm-up"] = 2}, seconds)
  local found = (result or partial or {}).modes or {}
  for mode in modes:gmatch "[^,]+" do found[mode] = found[mode] or {failed = reason} end
  return found
end

local results = {cells = {}}

-- Writes all results so far, so that a process that is killed loses none.
local function save()
  if opt.json ~= "" then bench.write(opt.json, results) end
end

local function measure_peer(cell)
  local modes = cell.compiled and "compile" or opt.device == "cpu" and "eager" or "eager,graph"
  cell.peer = theirs(cell, modes, cell.dtype, (cell.compiled and 6 or 1) * opt.cell)
  save()
  if cell.dtype == "f32" and not cell.compiled then
    cell.tf32 = theirs(cell, "eager", "tf32", opt.cell).eager
  end
end

-- Measures a cell: ours, the peer's, and ours again.
local function fill(cell)
  local sum = 0.0
  for turn = 1, opt.peer ~= "" and 2 or 1 do
    local result, reason = ours(cell)
    cell.failed = reason
    if not result then break end
    cell.best, cell.rounds[turn], sum = result, result, sum + result.images_per_s
    cell.images_per_s = sum / turn
    save()
    if turn == 1 and opt.peer ~= "" then measure_peer(cell) end
  end
  save()
end

-- ==== The table ==================================================================================

local row = measure.row_of "%-13s %-5s %5s %10s %9s %9s  %10s %9s %7s  %10s %7s"

local function line(...) print(row(...)) end

-- Returns a peer's rate, or the reason why it failed, and our rate divided by the peer's.
local function peer_texts(cell, found)
  if not found then return "", "" end
  if not found.images_per_s then return (found.failed or "failed"):sub(1, 13), "" end
  local times = cell.images_per_s and ("%.2fx"):format(cell.images_per_s / found.images_per_s)
  return rate_text(found.images_per_s), times or ""
end

local function report(cell)
  local peer = cell.peer or {}
  if cell.compiled then
    local rate, ratio = peer_texts(cell, peer.compile or cell)
    return print("%-13s %-5s %5d  torch.compile: %s %s", cell.model, cell.dtype, cell.batch, rate,
                 ratio)
  end
  local eager, ratio = peer_texts(cell, peer.eager)
  local graph, graph_ratio = peer_texts(cell, peer.graph)
  local memory = peer.eager and peer.eager.peak_bytes
  local best = cell.best
  line(cell.model, cell.dtype, cell.batch,
       cell.images_per_s and rate_text(cell.images_per_s) or cell.failed,
       best and ("%.0f %%"):format(100 * best.of_limit) or "",
       best and memory_text(best.peak_tensor_bytes) or "",
       eager, memory and memory_text(memory) or "", ratio, graph, graph_ratio)
end

local function find(model, dtype, batch, compiled)
  for _, cell in ipairs(results.cells) do
    if cell.model == model and cell.dtype == dtype and cell.batch == batch
       and cell.compiled == compiled then return cell end
  end
end

local function times_text(a, b)
  return a and b and a > 0 and b > 0 and ("%.2fx"):format(a / b) or "-"
end

-- Prints the speedup of fp16, ours and the peer's, over its own f32 and over the peer's TF32.
local function report_gains(models, batch)
  for _, model in ipairs(models) do
    local half, single = find(model, "fp16", batch), find(model, "f32", batch)
    if half and single then
      local a = half.peer and half.peer.eager or {}
      local b = single.peer and single.peer.eager or {}
      local tf32 = single.tf32 or {}
      print("%-13s fp16 over f32: ours %s, eager %s; eager fp16 over TF32: %s; our fp16 over it: "
            .. "%s", model, times_text(half.images_per_s, single.images_per_s),
            times_text(a.images_per_s, b.images_per_s),
            times_text(a.images_per_s, tf32.images_per_s),
            times_text(half.images_per_s, tf32.images_per_s))
    end
  end
end

-- The speed of the first cell, in words.
local function summary(model, dtype, batch)
  local cell = find(model, dtype, batch) or find(model, dtype, batch, true)
  if not (cell and cell.images_per_s) then return "" end
  local text = ("; %s %s %d: %s img/s"):format(model, dtype, batch, rate_text(cell.images_per_s))
  local compiled = find(model, dtype, batch, true)
  for _, found in ipairs{cell, compiled ~= cell and compiled or nil} do
    for _, mode in ipairs{"eager", "graph", "compile"} do
      local rate = found.peer and found.peer[mode] and found.peer[mode].images_per_s
      if rate then text = ("%s, %.2fx %s"):format(text, found.images_per_s / rate, mode) end
    end
  end
  return text
end

-- ==== Main =======================================================================================

local function words_of(flag, known)
  return measure.words_of(flag, opt[flag], known, "value")
end

local models, dtypes = words_of("models", MODELS), words_of("dtypes", AMP)
local batches = words_of("batches", COUNTS)
for i, word in ipairs(batches) do batches[i] = math.tointeger(word) end
local compiled = {}
for _, model in ipairs(opt.compile ~= "" and words_of("compile", MODELS) or {}) do
  compiled[model] = true
end
if opt.json ~= "" then bench.want_file(opt.json) end
save() -- a file without cells is JSON, too

local asks = measure.limited({program, "--device", opt.device, "--version"}, 60)
local pipe <close> = io.popen(measure.command(asks), "r")
local version = pipe:read "a"
local there, _, code = pipe:close()
if not there then os.exit(code, true) end
local peer, peer_text = measure.peer_version(opt.peer, 60)
print("%speer: %s\n", version, peer_text)
local plan = {}

local function add(model, dtype, batch, is_compiled)
  plan[#plan + 1] = {model = model, dtype = dtype, batch = batch, compiled = is_compiled,
                     rounds = {}}
end

for _, model in ipairs(models) do
  for _, dtype in ipairs(dtypes) do add(model, dtype, batches[1]) end
end
for _, model in ipairs(peer and models or {}) do
  if compiled[model] then add(model, dtypes[1], batches[1], true) end
end
for i = 2, #batches do
  for _, dtype in ipairs(dtypes) do
    for _, model in ipairs(dtype ~= "f32" and models or {}) do add(model, dtype, batches[i]) end
  end
end

if opt.skip >= #plan then refuse("--skip: there are only %d cells", #plan) end

local unknown
limits, unknown = call(net, {limits = "only"}, 60)
if not limits then refuse("cannot measure the limits of the device: %s", unknown) end
print("%s\n", bench.limits_text(limits))
results.version, results.peer, results.limits = version, peer and peer:match "%S+$", limits

line("model", "dtype", "batch", "img/s", "of limit", "memory", "eager", "memory", "ratio", "graph",
     "ratio")
local measured = opt.skip
for i = opt.skip + 1, #plan do
  results.cells[#results.cells + 1] = plan[i]
  fill(plan[i])
  report(plan[i])
  if is_late then break end
  measured = i
end
print ""
report_gains(models, batches[1])
for _, cell in ipairs(results.cells) do
  if opt.ops and cell.best and not cell.compiled and cell.batch == batches[1]
     and cell.dtype == dtypes[1] then
    print("\n%s, %s, %d images, synchronized after each op:\n\n%s", cell.model, cell.dtype,
          cell.batch, bench.table_text(cell.best))
  end
end
print ""
if measured < #plan then
  local options = {skip = measured}
  for _, name in ipairs{"device", "models", "dtypes", "batches", "compile", "peer", "cell",
                        "steps", "side"} do options[name] = opt[name] end
  if opt.json ~= "" then
    local stem = opt.json:gsub("%.json$", "")
    options.json = ("%s-%d.json"):format(stem, measured)
  end
  measure.print_rest({folder .. "/gpu_bench"}, options)
end
print("after %.0f s, %d of %d cells%s", opt.seconds - (deadline - bench.clock()),
      measured - opt.skip, #plan - opt.skip, summary(models[1], dtypes[1], batches[1]))
local all = true
for _, cell in ipairs(results.cells) do
  all = all and (not cell.failed or cell.failed == "out of memory" or cell.failed == "no time")
end
os.exit(all, true)
