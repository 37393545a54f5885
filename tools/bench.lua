-- bench.lua - compares luatrain with PyTorch, the peer: the speed of whole training steps of some
-- nets, and the time until training reaches an accuracy. tools/bench runs it.
--
-- Each measurement runs in its own process, and the two alternate: ours, peer, ours, peer.
-- Other load on the machine then affects both, and the median of the ratios of such pairs is more
-- reliable than the ratio of two sums. The peer has as many threads as we do. The first round tries
-- it with and without channels_last; the later rounds use the faster layout.
--
-- The column "of limit" is the time that the ops of a step would take if each reached its limit,
-- the product or the copy (see lua/luatrain/commands/bench.lua), as a fraction of the step. It and
-- the table of ops are from our fastest round. The limits are measured once, before the first cell;
-- with several ranks, each process measures its own.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"
local measure = require "measure"

local BATCHES = {lenet = 64, resnet20 = 128, mobilenet_v1 = 16, resnet50 = 16, vgg16 = 8}
local AMP = {f32 = "off", bf16 = "bf16"}

local opt = lt.args{
  models = "lenet,resnet20,mobilenet_v1,resnet50,vgg16", dtypes = "f32,bf16", batch = 0,
  rounds = 3, seconds = 3.0, ranks = 1, steps = 12,
  peer = os.getenv "PEER" or "", compile = false, ops = false,
  json = "", baseline = "", margin = 5.0, to = 0.0, epochs = 3, data = "fashion-mnist",
  help = {
    models = "nets; images are 28x28x1 for the small ones, 224x224x3 for the others",
    dtypes = "precisions",
    batch = "images per step; 0: 64, 128, 16, 16 and 8",
    rounds = "measurements of each cell, in turn",
    seconds = "minimum duration of a measurement, which has at least three steps",
    ranks = "processes, started by mpirun, that share the batch and the CPUs; the peer uses gloo",
    steps = "steps of a measurement with several ranks",
    peer = "a Python that has PyTorch (the variable PEER); without it, only luatrain is measured",
    compile = "also measure torch.compile; requires a C++ compiler, and minutes for a large net",
    ops = "print luatrain's time by ops, for each net",
    json = "write all results to this file",
    baseline = "compare with an earlier --json file; exit with 1 if slower",
    margin = "slowdown in percent that --baseline tolerates",
    to = "instead: time until ResNet-20 reaches this top-1 on Fashion-MNIST, such as 0.92",
    epochs = "epochs of that training",
    data = "data of that training: fashion-mnist or fashion-mnist:DIR",
  }}

local program, command, call = measure.program, measure.command, measure.call
local print, words_of, add, ratio = measure.print, measure.words_of, measure.add, measure.ratio
local rate_text, ratio_text = measure.rate_text, measure.ratio_text

local function call_peer(what, options) return measure.call_peer(opt.peer, what, options) end

-- ==== Steps ======================================================================================

local net = measure.folder .. "/bench_net.lua"
local limits                   -- of the machine, as JSON, once measured

local function measure_ours(cell)
  if opt.ranks == 1 then
    return call({program(), net}, {arch = cell.model, amp = AMP[cell.dtype], batch = cell.batch,
                                   seconds = opt.seconds, limits = limits})
  end
  local result = call({program(), "launch", "-n", opt.ranks, net}, {
    arch = cell.model, amp = AMP[cell.dtype], batch = cell.batch // opt.ranks, steps = opt.steps,
    seconds = 0})
  if result then result.images_per_s = opt.ranks * result.images_per_s end
  return result
end

local function measure_peer(cell, layout, compiled)
  return call_peer("step", {
    model = cell.model, dtype = cell.dtype, batch = cell.batch // opt.ranks,
    seconds = opt.ranks > 1 and 0 or opt.seconds, steps = opt.ranks > 1 and opt.steps or nil,
    ranks = opt.ranks, threads = math.max(bench.machine().threads // opt.ranks, 1),
    ["channels-last"] = layout == "channels_last", ["warm-up"] = 2, compile = compiled})
end

-- Returns the faster layout for the peer, and its result with it; nil if the peer fails.
local function try_layouts(cell)
  return measure.try_layouts(function(layout) return measure_peer(cell, layout) end)
end

-- Runs one round of each kind. Returns false if ours or the peer's fails. A failure of
-- torch.compile is only noted.
local function round(cell)
  if not add(cell.ours, measure_ours(cell)) then return false end
  if opt.peer == "" then return true end
  local result
  if cell.layout then
    result = measure_peer(cell, cell.layout)
  else
    cell.layout, result = try_layouts(cell)
  end
  if not add(cell.peer, result) then return false end
  if opt.compile and not cell.uncompiled then
    cell.uncompiled = not add(cell.compiled, measure_peer(cell, cell.layout, true))
  end
  return true
end

-- A cell: a line of the table, for a net in one precision.
local function new_cell(model, dtype)
  return {model = model, dtype = dtype, batch = opt.batch > 0 and opt.batch or BATCHES[model],
          ours = measure.new_series(), peer = measure.new_series(), compiled = measure.new_series()}
end

local function fill(cell)
  for _ = 1, opt.rounds do
    cell.failed = not round(cell)
    if cell.failed then return end
  end
  cell.ratio, cell.compiled_ratio = ratio(cell.ours, cell.peer), ratio(cell.ours, cell.compiled)
end

-- ==== The table ==================================================================================

local row = measure.row_of "%-13s%-5s%6s %9s %9s %9s   %9s %9s %7s   %9s %7s"

local function memory_text(result) return measure.memory_text(result.peak_rss_bytes) end

local HEAD = row("model", "dtype", "batch", "img/s", "of limit", "memory",
                 "peer", "memory", "ratio", "compiled", "ratio")

local function cell_text(cell)
  local ours, peer, compiled = cell.ours, cell.peer, cell.compiled
  local texts = {rate_text(ours.images_per_s), ("%.0f %%"):format(100 * ours.best.of_limit),
                 memory_text(ours.best), "", "", "", "", ""}
  if cell.ratio then
    texts[4], texts[5] = rate_text(peer.images_per_s), memory_text(peer.best)
    texts[6] = ratio_text(cell.ratio)
  end
  if cell.compiled_ratio then
    texts[7], texts[8] = rate_text(compiled.images_per_s), ratio_text(cell.compiled_ratio)
  end
  if cell.uncompiled then texts[7], texts[8] = "failed", "" end
  return row(cell.model, cell.dtype, cell.batch, table.unpack(texts))
end

-- The highest limits that any of our processes measured.
local function best_limits(cells)
  local limits = {gemm = {f32 = 0, bf16 = 0}, copy = 0}
  for _, cell in ipairs(cells) do
    local seen, gemm = cell.ours.best.limits, limits.gemm
    for dtype, rate in pairs(seen.gemm) do gemm[dtype] = math.max(gemm[dtype], rate) end
    limits.copy = math.max(limits.copy, seen.copy)
  end
  return limits
end

-- Measures all cells, and prints each when it is done. Returns the cells that did not fail, and
-- whether all succeeded.
local function measure_all(models, dtypes)
  local cells, all = {}, true
  if opt.ranks == 1 then
    local measured = call({program(), net}, {limits = "only"})
    if not measured then measure.fail(1, "the limits of the machine cannot be measured") end
    limits = json.text(measured)
  end
  print(HEAD)
  for _, model in ipairs(models) do
    for _, dtype in ipairs(dtypes) do
      local cell = new_cell(model, dtype)
      fill(cell)
      all = all and not cell.failed and not cell.uncompiled
      if cell.failed then
        print(row(model, dtype, cell.batch, "failed", "", "", "", "", "", "", ""))
      else
        cells[#cells + 1] = cell
        print(cell_text(cell))
        if opt.ops then print("\n" .. bench.table_text(cell.ours.best) .. "\n") end
      end
    end
  end
  return cells, all
end

-- Compares cells with those of an earlier table and prints the differences. Returns false if one is
-- slower than the margin allows.
local function compare(cells, before)
  local was, good = {}, true
  for _, cell in ipairs(before) do was[cell.model .. " " .. cell.dtype] = cell end
  print(("\ncompared with %s:"):format(opt.baseline))
  for _, cell in ipairs(cells) do
    local name = cell.model .. " " .. cell.dtype
    local old = was[name]
    if old then
      for _, text in ipairs(bench.compare(cell.ours.best, old.ours.best, name)) do print(text) end
      good = good and cell.ours.images_per_s >= (1 - opt.margin / 100) * old.ours.images_per_s
    else
      print(name .. ": not in it")
    end
  end
  if not good then print(("slower by more than %g %% (--margin)"):format(opt.margin)) end
  return good
end

-- ==== Time to an accuracy ========================================================================

-- Trains in one precision. Returns {reached, epoch, top1, seconds}; seconds is the time from the
-- start of the process to the end of the evaluation that first reached the accuracy. nil if
-- training fails.
local function train(dtype)
  local out = os.tmpname()
  os.remove(out)
  local before = bench.clock()
  local done = os.execute(command(
    {program(), "--quiet", "--out", out, "--amp", AMP[dtype], "train_resnet.lua"},
    {data = opt.data, epochs = opt.epochs}))
  local wall, result = bench.clock() - before, {reached = false, epoch = 0, top1 = 0.0}
  if not done then return nil end
  for text in io.lines(out .. "/metrics.jsonl") do
    local event = json.read(text)
    if event.event == "epoch" and not result.reached then
      result.reached, result.epoch, result.top1 = event.top1 >= opt.to, event.epoch, event.top1
      result.t = event.t
    elseif event.event == "end" then
      result.seconds = wall - (event.t - result.t)
    end
  end
  os.execute("rm -r " .. measure.quote(out))
  return result
end

-- The same for the peer. Its seconds begin after PyTorch is loaded.
local function train_peer(dtype, layout)
  return call_peer("train", {
    dtype = dtype, to = opt.to, epochs = opt.epochs, threads = bench.machine().threads,
    data = opt.data:match "^fashion%-mnist:(.+)$", ["channels-last"] = layout == "channels_last"})
end

local function training_text(who, r)
  return ("%s %s after %.0f s (%.2f %% after epoch %d)"):format(
    who, r.reached and "reached" or "not reached", r.seconds, 100 * r.top1, r.epoch)
end

-- Trains with both and prints their times. Returns the results, and whether none failed and ours
-- reached the accuracy.
local function race(dtype)
  local ours, peer, layout = train(dtype), nil, nil
  if not ours then
    print(("%-5s failed"):format(dtype))
    return {dtype = dtype}, false
  end
  print(("%-5s %s"):format(dtype, training_text("ours", ours)))
  if opt.peer ~= "" then
    layout = try_layouts(new_cell("resnet20", dtype))
    peer = layout and train_peer(dtype, layout)
    print(("%-5s %s"):format("", peer and training_text("peer", peer) .. ": "
                                 .. ratio_text(peer.seconds / ours.seconds) or "peer failed"))
  end
  local good = ours.reached and (peer ~= nil or opt.peer == "")
  return {dtype = dtype, ours = ours, peer = peer, layout = layout}, good
end

-- ==== Main =======================================================================================

local models = words_of("models", opt.models, BATCHES)
local dtypes = words_of("dtypes", opt.dtypes, AMP)
local before = opt.baseline ~= "" and bench.read(opt.baseline, {cells = {
  {model = "", dtype = "", ours = {images_per_s = 0, best = bench.COMPARED}}}})
if opt.json ~= "" then bench.want_file(opt.json) end
local peer, peer_text = measure.peer_version(opt.peer)
local all, good = {machine = bench.machine(), peer = peer}, true
print("%s\npeer: %s\n", bench.machine_text(all.machine), peer_text)
if opt.to > 0 then
  all.trainings = {}
  print(("ResNet-20 until %g %% on Fashion-MNIST, total time of the process:"):format(100 * opt.to))
  for i, dtype in ipairs(dtypes) do
    local there
    all.trainings[i], there = race(dtype)
    good = good and there
  end
else
  all.cells, good = measure_all(models, dtypes)
  if #all.cells > 0 then print("\n" .. bench.limits_text(best_limits(all.cells))) end
end
if opt.json ~= "" then bench.write(opt.json, all) end
if before and all.cells then good = compare(all.cells, before.cells) and good end
os.exit(good, true)
