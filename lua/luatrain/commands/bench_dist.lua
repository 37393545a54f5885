-- bench_dist.lua - measures the cost of data parallelism: `luatrain bench dist`.
--
-- First it times allreduces of several sizes, and MPI_Allreduce if MPI is available. Then, with a
-- script, it times steps of its training: a few apart, as if each rank were alone, a few together,
-- and so on in turn, so that other load on the machine affects both. The first step after each
-- change is not timed. Some steps run apart but end together, with nothing sent. They show the time
-- lost because ranks' speeds differ from step to step. No communication method could recover it.
--
-- Finally it predicts the speed for other networks and numbers of ranks by a simulation. Forward,
-- backward and optimizer take the time measured apart. Each bucket is sent when its gradients are
-- ready and the previous bucket is done. In a ring of n ranks, an allreduce of S bytes takes
-- 2 (n - 1) alpha + 2 (n - 1) / n S beta (Thakur et al. 2005), where alpha is the latency of a
-- message and beta the time per byte. The simulation ignores the wait for the slowest rank and the
-- CPU time of communication.
--
-- In a pipeline, it compares ways to sum the gradients of a stage over its replicas. The planner
-- predicts pipelines, so it predicts nothing.

local core = ...
local bench = require "luatrain.commands.bench"
local command_line = require "luatrain.command_line"
local ranks = require "luatrain.train.ranks"
local read_server = require "luatrain.train.parallel".server
local sum = require "luatrain.sum"

local bench_dist = {}

local WARM_UP, FEW = 3, 3         -- untimed steps at the start; timed steps per turn of a way
local SMALLEST = 1 << 10          -- bytes of the smallest allreduce
local SECONDS = 0.3               -- time for all allreduces of one size, in four measurements
local LEAST, MOST = 5, 200        -- limits for the number of allreduces in a measurement
local FIT = {1 << 16, 1 << 24}    -- range of sizes in bytes from which alpha and beta are fitted
local LATENCY = 30                -- default latency of a network, in microseconds
local RANKS = {24, 32}            -- numbers of ranks to predict, besides the actual number

local rank, size = core.rank()
local wire, wire_bytes = core.wire()

-- ==== Statistics over all ranks ==================================================================

-- For a list of numbers on each rank: returns the means and the maxima over the ranks, as lists.
local function over_ranks(list)
  local means, most = {}, {}
  for i, number in ipairs(list) do
    local all = ranks.gather("the times of all ranks", {number})
    means[i], most[i] = sum(all) / size, math.max(table.unpack(all))
  end
  return means, most
end

local function mean(list) return sum(list) / #list end

-- ==== Allreduce ==================================================================================

-- The median time of n allreduces of `bytes` bytes, in seconds. With by_mpi, times MPI_Allreduce;
-- nil if MPI is not available.
local function time_sums(bytes, n, by_mpi)
  local seconds = core.time_sums(bytes // 4, n, by_mpi)
  return seconds and over_ranks{(bench.spread(seconds))}[1]
end

-- Times allreduces of one size, ours and MPI's in turn.
local function measure_sums(bytes)
  local once = time_sums(bytes, 3)
  local n = math.max(LEAST, math.min(MOST, math.floor(SECONDS / 4 / once)))
  local ours, mpi = {}, {}
  for i = 1, 2 do
    ours[i] = time_sums(bytes, n)
    mpi[i] = time_sums(bytes, n, true)
  end
  return {bytes = bytes, seconds = math.min(ours[1], ours[2]),
          mpi_seconds = mpi[1] and math.min(mpi[1], mpi[2])}
end

local function all_sums(most)
  local list, bytes = {}, SMALLEST
  while bytes <= most do
    list[#list + 1] = measure_sums(bytes)
    bytes = 4 * bytes
  end
  return list
end

local function bytes_text(bytes)
  return bytes < 1 << 20 and ("%d KiB"):format(bytes >> 10) or ("%d MiB"):format(bytes >> 20)
end

-- The table of allreduces. "of copy" relates the memory traffic to the rate of a copy: each rank
-- reads its part of all ranks' data, and then the sums of the other parts.
local function sums_text(list, copy)
  local lines = {{"allreduce", "us", "GB/s", "of copy", "MPI us", "GB/s", "times as fast"}}
  for _, s in ipairs(list) do
    local mpi = s.mpi_seconds
    lines[#lines + 1] = {
      bytes_text(s.bytes), ("%.1f"):format(1e6 * s.seconds),
      ("%.2f"):format(s.bytes / s.seconds / 1e9),
      ("%.0f %%"):format(100 * 2 * size * s.bytes / s.seconds / copy),
      mpi and ("%.1f"):format(1e6 * mpi) or "",
      mpi and ("%.2f"):format(s.bytes / mpi / 1e9) or "",
      mpi and ("%.1f"):format(mpi / s.seconds) or ""}
  end
  return bench.columns(lines, 1)
end

-- ==== Steps ======================================================================================

-- The ways to run steps; those after the first `usual` are for --ablation. bucket: its size in
-- bytes, 0 for the default; 1 byte makes a bucket per parameter, and WHOLE a bucket per stage.
-- delay: the next step applies the sums, as with delay=1.
local WHOLE = 1 << 40
local WAYS = {
  usual = 3,
  {name = "apart", apart = true, blocking = false, bucket = 0},
  {name = "together", apart = false, blocking = false, bucket = 0},
  {name = "apart, synchronized", apart = true, blocking = false, bucket = 0, in_step = true},
  {name = "sent after backward", apart = false, blocking = true, bucket = 0},
  {name = "a bucket per parameter", apart = false, blocking = false, bucket = 1},
  {name = "a bucket each, after backward", apart = false, blocking = true, bucket = 1},
}
local PIPELINE_WAYS = {
  usual = 2,
  {name = "no sums", apart = true, blocking = false, bucket = 0},
  {name = "sums within the last pass", apart = false, blocking = false, bucket = 0},
  {name = "after the last pass", apart = false, blocking = true, bucket = 0},
  {name = "one per stage", apart = false, blocking = false, bucket = WHOLE},
  {name = "one per parameter", apart = false, blocking = false, bucket = 1},
  {name = "one each, after the last pass", apart = false, blocking = true, bucket = 1},
  {name = "within the next step", apart = false, blocking = false, bucket = 0, delay = true},
}

-- The parts of a step, and their names in the table.
local PARTS = {"forward", "backward", "optimizer", "waited"}
local PIPELINE_PARTS = {"forward", "backward", "weights", "waiting", "optimizer", "waited"}
local HEADS = {waiting = "messages", waited = "waits"}
local in_pipeline = core.pipeline() ~= nil
local ALL_WAYS, ALL_PARTS = in_pipeline and PIPELINE_WAYS or WAYS,
                            in_pipeline and PIPELINE_PARTS or PARTS

local function new_way(kind)
  local way = {kind = kind, collectives = 0, ready = {}, total = {}, sent = {}, rounds = {}}
  for _, name in ipairs(ALL_PARTS) do way[name] = {} end
  return way
end

local function parts_of(spent, apart)
  local waited, own = apart and 0.0 or core.reduced(), spent.own
  if own then                    -- the times of a pipeline's stage
    return {forward = own.forward, backward = own.backward, weights = own.weights,
            waiting = own.waiting, optimizer = own.optimizer - waited, waited = waited}
  end
  return {forward = spent.inside - spent.backward - spent.optimizer,
          backward = spent.backward, optimizer = spent.optimizer - waited, waited = waited}
end

-- Records the bytes of each bucket sent in the last step, and the time when it was ready.
local function record_buckets(way)
  local n = 0
  for _, b in ipairs(core.buckets()) do
    if b.bytes > 0 then
      n = n + 1
      way.ready[n] = way.ready[n] or {bytes = b.bytes, times = {}}
      table.insert(way.ready[n].times, b.ready)
    end
  end
  way.collectives = n
end

-- Runs the steps of a run in all ways in turn, until each way has o.steps timed steps.
local Turns = {}
Turns.__index = Turns

local function new_turns(o)
  local self = setmetatable({ways = {}, steps = o.steps, rows = 0, at = 0, left = WARM_UP}, Turns)
  for i = 1, o.ablation and #ALL_WAYS or ALL_WAYS.usual do self.ways[i] = new_way(ALL_WAYS[i]) end
  return self
end

-- Removes the way with a delay, which excludes a loss scale.
function Turns:remove_delay()
  if self.ways[#self.ways].kind.delay then table.remove(self.ways) end
end

-- Switches to the next way, for one untimed step and FEW timed ones. Synchronizes the ranks first.
function Turns:change()
  core.configure(false, false, 0)
  core.sum("the switch to the next way", 0)
  self.at = self.at % #self.ways + 1
  local kind = self.ways[self.at].kind
  core.configure(kind.apart, kind.blocking, kind.bucket, kind.delay)
  self.left = 1 + FEW
end

-- Waits until all ranks are here, then separates them again. Returns the seconds.
local function wait_for_all()
  local before = core.clock()
  core.configure(false, false, 0)
  core.sum("the end of a step", 0)
  core.configure(true, false, 0)
  return core.clock() - before
end

function Turns:end_step(rows, spent)
  local way = self.ways[self.at]
  local wait = way and way.kind.in_step and wait_for_all() or 0.0
  if way and self.left <= FEW then
    local parts = parts_of(spent, way.kind.apart)
    parts.waited = parts.waited + wait
    for _, name in ipairs(ALL_PARTS) do table.insert(way[name], parts[name]) end
    table.insert(way.total, spent.total + wait)
    table.insert(way.sent, spent.sent)
    if way.kind.delay then
      way.collectives = select(2, core.reduced())    -- of the step before; these still run
    elseif not way.kind.apart then
      record_buckets(way)
    end
    self.rows = rows
  end
  self.left = self.left - 1
  if self.left > 0 then return end
  if way then
    local total = way.total
    table.insert(way.rounds, mean(table.move(total, #total - FEW + 1, #total, 1, {})))
  end
  self:change()
end

function Turns:is_done()
  return self.at == 1 and #self.ways[#self.ways].total >= self.steps
end

-- The result of a way. Each part of the step is a mean over the ranks. The total is the time of the
-- slowest rank in each round of FEW steps, since the others wait for it. ratio compares the total
-- with `apart`, the result of the first way, round by round.
local function way_result(way, apart)
  local r, parts, ratios = {name = way.kind.name}, {}, {}
  local _, most = over_ranks{way.collectives}      -- the stages of a pipeline have different ones
  r.collectives = math.tointeger(most[1])
  r.sent = mean(way.sent)
  for i, name in ipairs(ALL_PARTS) do parts[i] = mean(way[name]) end
  for i, seconds in ipairs((over_ranks(parts))) do r[ALL_PARTS[i]] = seconds end
  local _, rounds = over_ranks(way.rounds)
  local before = apart and apart.rounds or rounds
  for i, seconds in ipairs(rounds) do ratios[i] = before[i] / seconds end
  r.rounds, r.total, r.ratio = rounds, bench.spread(rounds), bench.spread(ratios)
  return r
end

-- The buckets in the order of sending: {bytes, ready = seconds of backward until it is ready}.
local function buckets_of(way)
  local list, ready = {}, {}
  for i, b in ipairs(way.ready) do
    ready[i] = bench.spread(b.times)
    list[i] = {bytes = b.bytes}
  end
  for i, seconds in ipairs((over_ranks(ready))) do list[i].ready = seconds end
  return list
end

local function ways_text(ways, rows)
  local head = {"steps", "ms", ways[1].name .. " / it", "img/s"}
  for _, name in ipairs(ALL_PARTS) do head[#head + 1] = HEADS[name] or name end
  table.move({"collectives", "MB sent"}, 1, 2, #head + 1, head)
  local lines = {head}
  for _, way in ipairs(ways) do
    local line = {way.name, ("%.1f"):format(1e3 * way.total), ("%.3f"):format(way.ratio),
                  ("%.1f"):format(rows / way.total)}
    for _, name in ipairs(ALL_PARTS) do
      line[#line + 1] = ("%.1f"):format(1e3 * way[name])
    end
    line[#line + 1] = tostring(way.collectives)
    line[#line + 1] = ("%.2f"):format(way.sent / 1e6)
    lines[#lines + 1] = line
  end
  return bench.columns(lines, 1)
end

-- ==== Prediction =================================================================================

-- Estimates alpha (seconds) and beta (seconds per byte) from measured allreduces over n_ranks
-- ranks, by a linear least-squares fit of the relative errors.
function bench_dist.fit(list, n_ranks)
  local n, sx, sy, sxx, sxy = 0.0, 0.0, 0.0, 0.0, 0.0
  for _, s in ipairs(list) do
    if s.bytes >= FIT[1] and s.bytes <= FIT[2] then
      local weight = 1 / s.seconds ^ 2
      n, sx, sy = n + weight, sx + weight * s.bytes, sy + weight * s.seconds
      sxx, sxy = sxx + weight * s.bytes ^ 2, sxy + weight * s.bytes * s.seconds
    end
  end
  local slope = (n * sxy - sx * sy) / (n * sxx - sx * sx)
  local start = math.max((sy - slope * sx) / n, 0.0)
  return {alpha = start / (2 * (n_ranks - 1)), beta = slope * n_ranks / (2 * (n_ranks - 1))}
end

-- alpha and beta of a network with `gbit` Gbit/s and a latency in microseconds. beta is per byte of
-- f32 gradients, whatever the wire's dtype.
local function network(gbit, latency)
  return {alpha = 1e-6 * latency, beta = wire_bytes / 4 * 8 / (1e9 * gbit)}
end

local function sum_seconds(n, link, bytes)
  return 2 * (n - 1) * link.alpha + 2 * (n - 1) / n * bytes * link.beta
end

-- The predicted time of a step of n ranks in seconds. apart: the result of steps apart.
function bench_dist.predict(n, link, apart, buckets)
  local free = sum_seconds(n, link, 0)              -- the network is busy with the step record
  for _, b in ipairs(buckets) do
    free = math.max(free, b.ready) + sum_seconds(n, link, b.bytes)
  end
  return apart.total + math.max(0, free - apart.backward)
end

local function predictions(o, sums, apart, together, buckets)
  local here, predict = bench_dist.fit(sums, size), bench_dist.predict
  local link = o.link and network(o.link, o.latency) or here
  local list = {{ranks = size, seconds = predict(size, here, apart, buckets),
                 measured = together.total, alpha = here.alpha, beta = here.beta}}
  for _, n in ipairs(RANKS) do
    list[#list + 1] = {ranks = n, seconds = predict(n, link, apart, buckets),
                       alpha = link.alpha, beta = link.beta}
  end
  return list
end

local function predictions_text(list, apart)
  local lines = {{"simulated", "ms", "of ideal", "alpha us", "GB/s", ""}}
  for _, p in ipairs(list) do
    local note = p.measured and ("measured %.1f ms, %+.1f %%"):format(
      1e3 * p.measured, 100 * (p.seconds / p.measured - 1)) or ""
    lines[#lines + 1] = {("%d ranks"):format(p.ranks), ("%.1f"):format(1e3 * p.seconds),
                         ("%.1f %%"):format(100 * apart.total / p.seconds),
                         ("%.1f"):format(1e6 * p.alpha), ("%.2f"):format(1e-9 / p.beta), note}
  end
  return bench.columns(lines, 1)
end

-- A lower bound for the time of a step: the bandwidth of the network is the only cost.
local function bound(o, apart, buckets)
  local bytes = 0.0
  for _, b in ipairs(buckets) do bytes = bytes + b.bytes end
  local on_wire = sum_seconds(size, network(o.link, 0), bytes)
  return {wire = on_wire, seconds = apart.forward + math.max(apart.backward, on_wire)}
end

-- ==== luatrain bench dist ========================================================================

local HELP = [[
usage: mpirun -np N luatrain [options] bench dist [bench options] [script.lua ...]
       luatrain --ranks N [options] bench dist ...

Times allreduces of several sizes. With a script, also times steps of its training in turn: with the
ranks apart, each as if it were alone; together; and apart but ending each step together, which
shows the cost of ranks that are not equally fast. Predicts the time of a step of 24 and 32 ranks.

With --parallel pipe=P,data=G, times only steps, in turn: without sums over the replicas, and with
sums that overlap with the last backward pass of each stage.

  --steps N          steps to time in each mode (12)
  --amp PRECISION    off, bf16 or fp16 (the script's setting)
  --most MIB         size of the largest allreduce (64)
  --ablation         also time steps that send after backward, or a bucket per parameter or stage
  --link GBIT        bandwidth of the predicted network, in Gbit/s (the measured one)
  --latency US       latency of a message in that network, in microseconds (%d)
  --json FILE        write all results to FILE
  --help             print this help]]

local OPTIONS = {steps = "count", amp = "amp", most = "count", ablation = true, link = "number",
                 latency = "number", json = "path"}

local function show_steps(o, r, turns)
  local apart = turns.ways[1]
  r.steps, r.batch, r.ways = #apart.total, turns.rows, {}
  for i, way in ipairs(turns.ways) do r.ways[i] = way_result(way, r.ways[1]) end
  if in_pipeline then
    return print(("%d steps of %d images in each way, %s wire\n%s"):format(
      r.steps, r.batch, wire, ways_text(r.ways, r.batch)))
  end
  r.buckets = buckets_of(turns.ways[2])
  r.predictions = predictions(o, r.sums, r.ways[1], r.ways[2], r.buckets)
  print(("\n%d steps of %d images in each mode, %s wire\n%s\n\n%s"):format(
    r.steps, r.batch, wire, ways_text(r.ways, r.batch),
    predictions_text(r.predictions, r.ways[1])))
  if o.link then
    r.bound = bound(o, r.ways[1], r.buckets)
    print(("\nAt %g Gbit/s, %d ranks need %.1f ms to exchange the gradients of a step. A step "
           .. "takes at least\nforward plus the longer of exchange and backward: %.1f ms. The "
           .. "measured step takes %.3f times as long."):format(
           o.link, size, 1e3 * r.bound.wire, 1e3 * r.bound.seconds,
           r.ways[2].total / r.bound.seconds))
  end
end

local function finish(o, turns)
  core.configure(false, false, 0)
  local r = {machine = bench.machine(), ranks = size, wire = wire}
  if in_pipeline then
    local _, stages, _, replicas = core.pipeline()
    r.stages, r.replicas = stages, replicas
    print(("%s per rank, %d stages of %d replicas\n"):format(bench.machine_text(r.machine), stages,
                                                            replicas))
  else
    r.copy = core.sum("the copies of all ranks", bench.copy_rate())
    r.sums = all_sums(o.most << 20)
    print(("%s per rank, %d ranks; copy %.1f GB/s\n\n%s"):format(
      bench.machine_text(r.machine), size, r.copy / 1e9, sums_text(r.sums, r.copy)))
  end
  if turns then show_steps(o, r, turns) end
  if o.json and rank == 0 then bench.write(o.json, r) end
end

-- The index of the script among the arguments after `bench dist`.
function bench_dist.script_index(...)
  return bench.read_options({...}, OPTIONS, {}, HELP:format(LATENCY)) or
    bench.refuse "dist with --parallel pipe=P requires a script: luatrain bench dist train.lua"
end

-- EUSAGE unless the replicas of a pipeline's stages can be measured with the options o.
local function check_pipeline(o)
  local _, _, _, replicas = core.pipeline()
  if replicas == 1 then
    bench.refuse "dist compares sums over replicas, but each stage has only one; use data=G"
  end
  for _, name in ipairs{"link", "latency", "most"} do
    if o[name] then
      bench.refuse("--%s has no effect with a pipeline; see luatrain plan --link", name)
    end
  end
end

-- Like bench.attach, for `luatrain bench dist`. Without a script, only the allreduce is measured.
function bench_dist.attach(...)
  local o = {}
  local script = bench.read_options({...}, OPTIONS, o, HELP:format(LATENCY))
  local name = script and select(script, ...)
  if size == 1 then
    bench.refuse "dist requires several ranks: mpirun -np 2 luatrain, or --ranks 2"
  end
  if in_pipeline then check_pipeline(o)
  elseif core.shards() > 1 then
    bench.refuse "dist requires one shard per rank; omit --vranks"
  elseif command_line.variable "LUATRAIN_SHARE" then
    bench.refuse "dist requires equal shards; omit --share"
  elseif read_server() then
    bench.refuse "dist measures the allreduce; omit --parallel sync-server"
  end
  if o.link == 0 then bench.refuse "--link must be above 0 Gbit/s" end
  if o.json and rank == 0 then bench.want_file(o.json) end
  o.steps, o.most, o.latency = o.steps or 12, o.most or 64, o.latency or LATENCY
  if not script then return nil, function() finish(o) end end
  local turns, folder = new_turns(o), bench.temporary_folder()
  local observer = {begin_step = function() end}

  function observer.end_step(_, rows, _, _, spent)
    turns:end_step(rows, spent)
    if turns:is_done() then core.fail("EDONE", "all steps are measured") end
  end

  function observer.stop(_, reason) core.fail("ESTOPPED", "bench: stopped by " .. reason) end

  function core.on_run(settings)
    local all = (o.steps + FEW) * (1 + FEW) // FEW * #turns.ways + WARM_UP
    bench.change(settings, all, folder, o.amp)
    if settings.amp == "fp16" then turns:remove_delay() end
    if settings.scaler ~= false then            -- scalers of ranks apart would diverge
      settings.scaler = {policy = "static", scale = 1.0}
    end
    return observer
  end

  return script, function()
    if rank == 0 then bench.remove_folder(folder) end
    if not turns:is_done() then
      core.fail("ESCRIPT", ("bench: %s ended before all steps were measured"):format(name))
    end
    finish(o, turns)
  end
end

return bench_dist
