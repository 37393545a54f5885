-- bench_pipeline.lua - compares pipelines of two processes with torch.distributed.pipelining, the
-- peer: both divide the same net at the same layer, and each batch into the same micro-batches.
-- `tools/bench pipeline` runs it.
--
-- Each process has one thread. A round measures both systems in turn, first with one process, which
-- trains on the whole batch at once, then with two. The efficiency is the rate of two processes
-- divided by twice the rate of one. Ratios and efficiencies are medians over the rounds.
--
-- The peer communicates with gloo. In the first round, it tries both memory layouts, for one
-- process and for two; the later rounds use the faster ones. With --hosts, the two processes run on
-- two hosts, which are joined by a link. The emulated hosts share the CPUs of this machine.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local measure = require "measure"

local BATCHES = {lenet = 64, resnet50 = 16, vgg16 = 8}
local CUTS = {lenet = "conv2", resnet50 = "stage3", vgg16 = "stage4"}
local LAGS = {gpipe = 0, ["1f1b"] = 0, zb = 1}     -- of our schedules; the peer's have none
local WARM_UP = 2

local opt = lt.args{
  models = "vgg16,resnet50", batch = 0, micro = 4, cut = "", schedules = "zb",
  peer_schedules = "1f1b", rounds = 5, steps = 8, hosts = "", load = 0.5,
  peer = os.getenv "PEER" or "", json = "",
  help = {
    models = "nets, in f32; images are 28x28x1 for lenet, 224x224x3 for the others",
    batch = "images per step; 0: 64 for lenet, 16 for resnet50, 8 for vgg16",
    micro = "micro-batches of a step",
    cut = "first layer or block of the second stage; the default: conv2, stage3 and stage4",
    schedules = "our schedules: zb, 1f1b without lag, gpipe; ratios are those of the first one",
    peer_schedules = "the peer's schedules: zb (InterleavedZeroBubble), 1f1b, gpipe",
    rounds = "measurements of each kind, in turn",
    steps = "measured steps of a measurement, after two that are not measured",
    hosts = "a command that runs others on two linked hosts, hosta and hostb; it takes -- PROGRAM, "
            .. "or --each 'PROGRAM' to run it on both with {rank} and {master} filled in",
    load = "the load average of this machine must be below this at the start",
    peer = "a Python that has PyTorch (the variable PEER); without it, only luatrain is measured",
    json = "write all results to this file",
  }}

local program, call = measure.program, measure.call
local print, rate_text, ratio_text = measure.print, measure.rate_text, measure.ratio_text

local NET = measure.folder .. "/bench_net.lua"

-- ==== Measuring ==================================================================================

local function joined(...)
  local list = {}
  for _, words in ipairs{...} do table.move(words, 1, #words, #list + 1, list) end
  return list
end

local function host_words()
  local words = {}
  for word in opt.hosts:gmatch "%S+" do words[#words + 1] = word end
  return words
end

-- Measures one process, or with a schedule two in a pipeline.
local function measure_ours(cell, schedule)
  local options = {arch = cell.model, batch = cell.batch, micro = schedule and opt.micro,
                   steps = opt.steps, seconds = 0, ["warm-up"] = WARM_UP, limits = "none"}
  if not schedule then return call({program(), "--threads", 1, NET}, options) end
  local parallel = ("pipe=2,micro=1,cut=%s,schedule=%s,lag=%d"):format(
    cell.cut, schedule, LAGS[schedule])
  local job = {"-n", 2, "--threads", 1, "--parallel", parallel, NET}
  if opt.hosts == "" then return call(joined({program(), "launch"}, job), options) end
  return call(joined(host_words(), {"--", program(), "launch", "-H", "hosta:1,hostb:1"}, job),
              options)
end

-- The same for the peer.
local function measure_peer(cell, schedule, layout)
  local options = {model = cell.model, batch = cell.batch, threads = 1, steps = opt.steps,
                   seconds = 0, ["warm-up"] = WARM_UP,
                   ["channels-last"] = layout == "channels_last"}
  if not schedule then return measure.call_peer(opt.peer, "step", options) end
  options.ranks, options.cut, options.micro, options.schedule = 2, cell.cut, opt.micro, schedule
  if opt.hosts == "" then return measure.call_peer(opt.peer, "pipeline", options) end
  local variables = {"env", "GLOO_SOCKET_IFNAME=eth0", "MASTER_ADDR={master}", "MASTER_PORT=29500",
                     "RANK={rank}", "WORLD_SIZE=2"}
  local words = joined(variables, measure.peer_words(opt.peer, "pipeline"))
  return call(joined(host_words(), {"--each", measure.command(words, options)}))
end

-- Measures the peer in its faster layout, which the first call finds and stores in the cell.
local function measure_faster(cell, schedule)
  local key, layouts = schedule or "one", cell.layouts
  if layouts[key] then return measure_peer(cell, schedule, layouts[key]) end
  local result
  layouts[key], result = measure.try_layouts(function(layout)
    return measure_peer(cell, schedule, layout)
  end)
  return result
end

-- A system: the series of one process, and a series for each schedule of two.
local function new_system(name, schedules)
  local system = {name = name, schedules = schedules, one = measure.new_series(), two = {}}
  for _, schedule in ipairs(schedules) do system.two[schedule] = measure.new_series() end
  return system
end

-- Runs one round. Returns false after a failure.
local function round(cell)
  local ours, peer = cell.ours, cell.peer
  if not measure.add(ours.one, measure_ours(cell)) then return false end
  if peer and not measure.add(peer.one, measure_faster(cell)) then return false end
  for _, schedule in ipairs(ours.schedules) do
    if not measure.add(ours.two[schedule], measure_ours(cell, schedule)) then return false end
  end
  for _, schedule in ipairs(peer and peer.schedules or {}) do
    if not measure.add(peer.two[schedule], measure_faster(cell, schedule)) then return false end
  end
  return true
end

-- ==== The table ==================================================================================

local row = measure.row_of "%-9s %5s %5s  %-14s %-8s %-8s %7s %7s %10s %10s %10s"

local HEAD = row("model", "batch", "micro", "cut", "system", "schedule", "one", "two", "efficiency",
                 "ratio, one", "ratio, two")

local function efficiency(system, schedule)
  return measure.ratio(system.two[schedule], system.one) / 2
end

-- Prints the rows of a system. The first row of the cell starts with its description. Our rates are
-- divided by those of the peer.
local function report(cell, system)
  for i, schedule in ipairs(system.schedules) do
    local first = system == cell.ours and i == 1
    local texts = first and {cell.model, cell.batch, opt.micro, cell.cut} or {"", "", "", ""}
    local one, two = "", ""
    if system == cell.peer then
      one = ratio_text(measure.ratio(cell.ours.one, system.one))
      two = ratio_text(measure.ratio(cell.ours.two[cell.ours.schedules[1]], system.two[schedule]))
    end
    table.move({i == 1 and system.name or "", schedule, rate_text(system.one.images_per_s),
                rate_text(system.two[schedule].images_per_s),
                ("%.0f %%"):format(100 * efficiency(system, schedule)), one, two}, 1, 7, 5, texts)
    print(row(table.unpack(texts)))
  end
end

-- Measures a net and prints its rows. Returns the results, and whether nothing failed.
local function fill(model, schedules, peer_schedules)
  local cell = {model = model, batch = opt.batch > 0 and opt.batch or BATCHES[model],
                cut = opt.cut ~= "" and opt.cut or CUTS[model], layouts = {},
                ours = new_system("luatrain", schedules),
                peer = opt.peer ~= "" and new_system("PyTorch", peer_schedules) or nil}
  for _ = 1, opt.rounds do
    if not round(cell) then
      print(row(model, cell.batch, opt.micro, cell.cut, "failed", "", "", "", "", "", ""))
      return cell, false
    end
  end
  report(cell, cell.ours)
  if cell.peer then report(cell, cell.peer) end
  return cell, true
end

-- ==== Main =======================================================================================

local function read_load()
  local file <close> = io.open("/proc/loadavg", "r")
  return file and file:read "n" or 0.0
end

local models = measure.words_of("models", opt.models, BATCHES)
local schedules = measure.words_of("schedules", opt.schedules, LAGS)
local peer_schedules = measure.words_of("peer-schedules", opt.peer_schedules, LAGS)
if opt.micro < 2 then measure.refuse "--micro must be at least 2" end
if opt.json ~= "" then bench.want_file(opt.json) end
local load_before = read_load()
if load_before >= opt.load then
  measure.fail(3, "the load average of this machine is %.2f, but must be below %g; wait until it "
                  .. "is idle, or raise --load", load_before, opt.load)
end
local peer, peer_text = measure.peer_version(opt.peer)
local all = {machine = bench.machine(), peer = peer, load = load_before,
             hosts = opt.hosts, rounds = opt.rounds, steps = opt.steps, cells = {}}
all.machine.threads = 1
print("%s per process\npeer: %s", bench.machine_text(all.machine), peer_text)
print(("load average %.2f; median of %d rounds of %d steps; hosts: %s\n"):format(
  load_before, opt.rounds, opt.steps, opt.hosts ~= "" and opt.hosts or "this one"))
local good = true
print(HEAD)
for i, model in ipairs(models) do
  local is_good
  all.cells[i], is_good = fill(model, schedules, peer_schedules)
  good = good and is_good
end
if opt.json ~= "" then bench.write(opt.json, all) end
os.exit(good, true)
