-- bench.lua - measures the speed of training, op by op, and compares it with the limits of the
-- machine: `luatrain bench script.lua`.
--
-- Measures some steps of the script's first run. A step lasts from the end of the previous step to
-- its own end, including the wait for data, as in the run's log. The library's timer measures each
-- op. The limits of the machine are measured afterwards in the same process: the rate of a product
-- of large matrices, and the bandwidth of the fastest copy of a large tensor.
--
-- The bytes of an op are the sizes of all tensors that it reads or writes; a tensor updated in
-- place counts twice. Batch norm reads a tensor that exceeds the last-level cache twice: for its
-- sums and for its results. An op takes at least the time of its multiply-adds at the rate of the
-- product, and of its bytes at the bandwidth of the copy (a roofline). The longer of the two is its
-- limit; `of_limit` is that time divided by the measured one. Small tensors that stay in a cache
-- move faster than a copy, so their of_limit may exceed 1.

local core = ...
local checkpoint = require "luatrain.train.checkpoint"
local command_line = require "luatrain.command_line"
local flops_of = require "luatrain.commands.flops"
local json = require "luatrain.json"
local read_flags = require "luatrain.commands.flags"
local sorted = require "luatrain.keys"
local ops, constructors = core.ops, core.constructors

local bench = {clock = core.clock}

local WARM_UP = 5                 -- steps before the timed ones
local SLOWER, LEAST = 1.1, 0.01   -- reports ops that are slower than before by this factor, if they
                                  -- take at least this fraction of the step
local SHOWN = 0.99                -- the table ends when its rows cover this fraction of the time

local function refuse(...) core.fail("EUSAGE", "bench: " .. string.format(...)) end
bench.refuse = refuse

-- ==== The machine ================================================================================

local function cpu_model()
  local file <close> = io.open("/proc/cpuinfo", "r")
  return file and file:read "a":match "model name%s*:%s*([^\n]*)" or "unknown CPU"
end

-- Identifies the machine, for all kinds of results.
function bench.machine()
  return {version = core.version, cpu = cpu_model(), backend = core.backend(),
          threads = core.threads()}
end

-- Whether new tensors are on an accelerator.
local function on_device() return constructors.zeros{1}.device ~= "cpu" end

-- The shortest time of `calls` calls of f, in seconds; waits for the device before and after each.
local function least(calls, f)
  local best = math.huge
  for _ = 1, calls do
    core.sync()
    local before = core.clock()
    core.step(core.no_grad, f)
    core.sync()
    best = math.min(best, core.clock() - before)
  end
  return best
end

-- The FLOP/s of a product of square matrices, large enough to take 50 ms or of size 8192.
local function gemm_rate(dtype)
  local n, seconds = 128
  repeat
    n = 2 * n
    local x, y = constructors.randn{n, n}:cast(dtype), constructors.randn{n, n}:cast(dtype)
    seconds = least(5, function() ops.matmul(x, y) end)
  until seconds > 0.05 or n == 8192
  return 2 * n ^ 3 / seconds
end

-- The size of the CPU's largest cache in bytes; 0 if unknown, and on an accelerator.
local function cache_bytes()
  if on_device() then return 0 end
  local most = 0
  for i = 0, 9 do
    local path = ("/sys/devices/system/cpu/cpu0/cache/index%d/size"):format(i)
    local file <close> = io.open(path, "rb")
    local kilobytes = file and file:read "a":match "^(%d+)K"
    most = math.max(most, 1024 * math.tointeger(tonumber(kilobytes or 0)))
  end
  return most
end

local function copy_seconds(x)
  local y = constructors.zeros(x.shape)
  return least(4, function() y:copy(x) end)
end

-- The bytes read and written per second by a copy, which bypasses the caches, or by an elementwise
-- op, whichever is faster. Source and result have twice the size of the largest cache each, but at
-- most 512 MiB, because a virtual machine may see a cache that is larger than its memory.
function bench.copy_rate()
  local cache = cache_bytes()
  local n = cache > 0 and math.min(cache // 2, 1 << 27) or 1 << 26
  local x = constructors.zeros{n}
  local seconds = copy_seconds(x)
  collectgarbage()  -- frees the result
  seconds = math.min(seconds, least(4, function() ops.neg(x) end))
  return 2 * 4 * n / seconds
end

-- Measures the limits of this machine: rates in FLOP/s, copy in bytes/s, cache in bytes. There is
-- no f16 rate for CPUs, which compute f16 in f32.
function bench.limits()
  collectgarbage()
  return {gemm = {f32 = gemm_rate "f32", bf16 = gemm_rate "bf16",
                  f16 = on_device() and gemm_rate "f16" or nil},
          copy = bench.copy_rate(), cache = cache_bytes()}
end

-- ==== Measuring ==================================================================================

local Meter = {}
Meter.__index = Meter

-- A meter for the time of steps. begin_step() and end_step() enclose each step. The first warm_up
-- steps are not counted.
function bench.meter(warm_up)
  return setmetatable({left = warm_up, rates = {}, images = 0, seconds = 0.0, waited = 0.0,
                       peak_rss = 0, peak_tensors = 0}, Meter)
end

function Meter:begin_step() core.time_ops(self.left == 0) end

-- images: in the step; seconds: its time; waited: the part of it spent waiting for data.
function Meter:end_step(images, seconds, waited)
  core.time_ops(false)
  if self.left > 0 then
    self.left = self.left - 1
    return
  end
  self.rates[#self.rates + 1] = images / seconds
  self.images, self.seconds = self.images + images, self.seconds + seconds
  self.waited = self.waited + waited
  self.peak_rss, self.peak_tensors = core.peak_rss(), core.memory().peak
end

-- Runs and measures one step f(...) on `images` images. Returns the total seconds so far.
function Meter:step(images, f, ...)
  self:begin_step()
  local before = core.clock()
  core.step(f, ...)
  self:end_step(images, core.clock() - before, 0.0)
  return self.seconds
end

-- Measures images per second of steps f(...) without timing ops, so that the device runs
-- asynchronously: it waits for the device only before and after `steps` steps. Repeats this for
-- `seconds` in total, at least three times. Returns the median and the best rate.
function bench.rates(images, steps, seconds, f, ...)
  local rates, total = {}, 0.0
  repeat
    core.sync()
    local before = core.clock()
    for _ = 1, steps do core.step(f, ...) end
    core.sync()
    local took = core.clock() - before
    rates[#rates + 1], total = steps * images / took, total + took
  until #rates >= 3 and total >= seconds
  return bench.spread(rates)
end

-- The bytes that batch norm reads a second time: x, and in backward dy too. 0 for other ops.
local function read_again(row, limits)
  if row.op ~= "batch_norm" or row.bytes / row.calls <= limits.cache then return 0 end
  local bytes = row.calls * (row.dtype == "f32" and 4 or 2) * (row.backward and 2 or 1)
  for _, dim in ipairs(row.shapes[1]) do bytes = bytes * dim end
  return bytes
end

-- Adds flops, limit and of_limit to the row of an op. Converts its numbers to averages per step.
local function rate_op(row, steps, limits)
  local gradients = row.backward and 0 or 1
  for _, name in ipairs(row.wanted) do
    if name ~= "b" then gradients = gradients + 1 end      -- a bias needs no multiply-adds
  end
  local x, w, out = table.unpack(row.shapes)
  row.flops = flops_of(row.op, x, w, out) * row.calls * gradients / steps
  row.bytes = row.bytes + read_again(row, limits)
  row.calls, row.seconds, row.bytes = row.calls / steps, row.seconds / steps, row.bytes / steps
  local products = row.flops / (limits.gemm[row.dtype] or math.huge)
  local moves = row.bytes / limits.copy
  row.limit = products > moves and "gemm" or "copy"
  row.of_limit = math.max(products, moves) / row.seconds
end

-- Returns the median and the largest of a list of numbers.
function bench.spread(list)
  local sorted = table.move(list, 1, #list, 1, {})
  table.sort(sorted)
  local half = #sorted // 2
  local middle = #sorted % 2 == 1 and sorted[half + 1] or (sorted[half] + sorted[half + 1]) / 2
  return middle, sorted[#sorted]
end

-- All results of a meter, as --json writes them. ops: sorted by time. Fractions of the step's time:
-- outside, the time outside of ops; waiting, for data; of_limit, the time that the ops would take
-- if each reached its limit.
function bench.result(meter, limits)
  local steps, rows = #meter.rates, core.op_times()
  local inside, at_limits = 0.0, 0.0
  for _, row in ipairs(rows) do
    rate_op(row, steps, limits)
    inside = inside + row.seconds
    at_limits = at_limits + row.seconds * math.min(1, row.of_limit)
  end
  table.sort(rows, function(a, b) return a.seconds > b.seconds end)
  local step_s = meter.seconds / steps
  local middle, best = bench.spread(meter.rates)
  return {
    machine = bench.machine(), limits = limits, ops = rows,
    steps = steps, batch = meter.images / steps, step_s = step_s,
    images_per_s = middle, best_images_per_s = best,
    waiting = meter.waited / meter.seconds, outside = 1 - inside / step_s,
    of_limit = at_limits / step_s,
    peak_rss_bytes = meter.peak_rss, peak_tensor_bytes = meter.peak_tensors,
  }
end

-- ==== The table ==================================================================================

local function dims_text(dims)
  return dims and (#dims > 0 and table.concat(dims, "x") or "1")
end

-- "conv2d back x,w": names the computed gradients of ops with multiply-adds, whose cost depends on
-- their number.
local function op_text(row)
  local text = row.op .. (row.dtype == "f32" and "" or " " .. row.dtype)
  if not row.backward then return text end
  return text .. " back" .. (row.flops > 0 and " " .. table.concat(row.wanted, ",") or "")
end

-- "8x8x3 16x3x3x3 > 8x8x16": the shapes of the inputs and, unless it equals the first, the output.
local function shapes_text(row)
  local x, w, out = table.unpack(row.shapes)
  local first, second, last = dims_text(x) or "", dims_text(w), dims_text(out)
  if row.flops > 0 then first = first .. " " .. second end
  return last and last ~= first and first .. " > " .. last or first
end

local function number_text(value)
  return value < 9.95 and ("%.1f"):format(value) or ("%.0f"):format(value)
end

local HEAD = {"op", "shapes", "calls", "ms", "%", "GFLOP/s", "GB/s", "of limit"}

local function cells_of(row, step_s)
  return {op_text(row), shapes_text(row), number_text(row.calls):gsub("%.0$", ""),
          ("%.3f"):format(1e3 * row.seconds), ("%.1f"):format(100 * row.seconds / step_s),
          row.flops > 0 and number_text(row.flops / row.seconds / 1e9) or "",
          number_text(row.bytes / row.seconds / 1e9),
          ("%.0f %% %s"):format(100 * row.of_limit, row.limit)}
end

-- Formats lists of cells as aligned lines: the first `left` columns are left-aligned, the others
-- right-aligned.
function bench.columns(lines, left)
  local widths = {}
  for _, cells in ipairs(lines) do
    for i, text in ipairs(cells) do widths[i] = math.max(widths[i] or 0, utf8.len(text)) end
  end
  for k, cells in ipairs(lines) do
    for i, text in ipairs(cells) do
      local fill = (" "):rep(widths[i] - utf8.len(text))
      cells[i] = i <= left and text .. fill or fill .. text
    end
    lines[k] = table.concat(cells, "  "):gsub(" +$", "")
  end
  return table.concat(lines, "\n")
end

function bench.machine_text(m)
  return ("luatrain %s  %s  %s  %d thread%s"):format(m.version, m.cpu, m.backend, m.threads,
                                                     m.threads == 1 and "" or "s")
end

function bench.limits_text(limits)
  local f16 = limits.gemm.f16 and (", %.0f f16"):format(limits.gemm.f16 / 1e9) or ""
  return ("limits: product %.0f GFLOP/s f32, %.0f bf16%s; copy %.1f GB/s"):format(
    limits.gemm.f32 / 1e9, limits.gemm.bf16 / 1e9, f16, limits.copy / 1e9)
end

-- The table of a result's ops, with times per step.
function bench.table_text(r)
  local lines, seconds, total = {HEAD}, 0.0, r.step_s * (1 - r.outside)
  for i, row in ipairs(r.ops) do
    lines[#lines + 1] = cells_of(row, r.step_s)
    seconds = seconds + row.seconds
    if seconds >= SHOWN * total and i < #r.ops then
      lines[#lines + 1] = {("%d more"):format(#r.ops - i), "", "",
                           ("%.3f"):format(1e3 * (total - seconds)),
                           ("%.1f"):format(100 * (total - seconds) / r.step_s)}
      break
    end
  end
  return bench.columns(lines, 2)
end

local function text_of(r)
  return ("%s\n%s\n\n%s\n\n%s\n%s\n%s"):format(
    bench.machine_text(r.machine), bench.limits_text(r.limits), bench.table_text(r),
    ("%d steps of %s images: %s img/s median, %s best; %.1f ms a step"):format(
      r.steps, number_text(r.batch):gsub("%.0$", ""), number_text(r.images_per_s),
      number_text(r.best_images_per_s), 1e3 * r.step_s),
    ("%.1f %% of it outside ops, including %.1f %% waiting for data; with each op at its limit it "
     .. "would take %.0f %%"):format(100 * r.outside, 100 * r.waiting,
                                     100 * (r.of_limit + r.outside)),
    ("peak memory %.2f GB, of which tensors %.2f GB"):format(r.peak_rss_bytes / 1e9,
                                                            r.peak_tensor_bytes / 1e9))
end

-- ==== Comparison with an earlier result ==========================================================

local function percent(now, before) return ("%+.1f %%"):format(100 * (now / before - 1)) end

-- The fields that compare() requires of an earlier result, as an example; {item} is a list.
bench.COMPARED = {
  images_per_s = 0, parameters = 0, batch = 0, machine = {}, ops = {{op = "", seconds = 0}},
  limits = {gemm = {f32 = 0, bf16 = 0}, copy = 0}}

-- The name of a field that is missing in value, or whose type differs from the example `wanted`.
-- Nil if value has all.
local function lack(value, wanted, name)
  if type(value) ~= type(wanted) then return name end
  if type(wanted) ~= "table" then return nil end
  for _, key in ipairs(sorted(wanted[1] and value or wanted)) do
    local missing = lack(value[key], wanted[1] or wanted[key], (name and name .. "." or "") .. key)
    if missing then return missing end
  end
end

-- Reads a file that --json wrote. EUSAGE unless it has all fields of the example `wanted`.
function bench.read(path, wanted)
  local file, why = io.open(path, "rb")
  if not file then refuse("cannot read %s", why) end
  local ok, value = pcall(json.read, file:read "a" or "")
  file:close()
  if not ok then refuse("%s: %s", path, checkpoint.reason(value)) end
  local missing = lack(type(value) == "table" and value or {}, wanted)
  if missing then refuse("%s is not a result of this benchmark: it has no '%s'", path, missing) end
  return value
end

-- EUSAGE if the path is not writable. Called before the measurement.
function bench.want_file(path)
  local file, why = io.open(path, "ab")
  if not file then refuse("cannot write %s", why) end
  file:close()
end

function bench.write(path, value) core.write_file(path, json.text(value, 2) .. "\n") end

-- The differences between two results in machine and precision, as text.
local function compare_machines(r, before)
  local now, was, text = r.limits, before.limits, ""
  for _, key in ipairs{"cpu", "threads", "backend"} do
    if r.machine[key] ~= before.machine[key] then
      text = ("%s; %s was %s"):format(text, key, before.machine[key])
    end
  end
  if r.amp ~= before.amp then text = ("%s; amp was %s"):format(text, before.amp) end
  return ("limits: product %s f32, %s bf16, copy %s%s"):format(
    percent(now.gemm.f32, was.gemm.f32), percent(now.gemm.bf16, was.gemm.bf16),
    percent(now.copy, was.copy), text)
end

local function key_of(row)
  return json.text{row.op, row.backward, row.dtype, row.shapes, row.wanted}
end

-- Compares a result with an earlier one of the same net. Returns lines of text: the speed, the
-- machine, and the ops that became notably slower. EUSAGE if the net or the batch differs.
function bench.compare(r, before, who)
  if r.parameters ~= before.parameters or r.batch ~= before.batch then
    refuse("%s: the earlier result is of another net or batch: %d parameters, %g images", who,
           before.parameters, before.batch)
  end
  local then_of = {}
  local lines = {("%s: %s img/s, %s before (%s); %s"):format(
    who, number_text(r.images_per_s), number_text(before.images_per_s),
    percent(r.images_per_s, before.images_per_s), compare_machines(r, before))}
  for _, row in ipairs(before.ops) do then_of[key_of(row)] = row.seconds end
  for _, row in ipairs(r.ops) do
    local was = then_of[key_of(row)]
    if was and row.seconds > SLOWER * was and row.seconds > LEAST * r.step_s then
      lines[#lines + 1] = ("  slower: %s %s: %.3f ms, %.3f before (%s)"):format(
        op_text(row), shapes_text(row), 1e3 * row.seconds, 1e3 * was, percent(row.seconds, was))
    end
  end
  return lines
end

-- ==== luatrain bench =============================================================================

local HELP = [[
usage: luatrain [options] bench [bench options] script.lua [script options]

Times steps of the script's training, op by op, and measures the limits of the machine.

  --steps N          steps to time, after %d warm-up steps (20)
  --amp PRECISION    off, bf16 or fp16 (the script's setting)
  --json FILE        write all results to FILE
  --baseline FILE    compare with an earlier --json FILE; exit with 1 if slower
  --margin PERCENT   slowdown that --baseline tolerates (5)
  --help             print this help

`luatrain bench dispatch` measures the overhead of an op; `luatrain bench dist` measures the cost
of training on several ranks.]]

-- Kinds of option values: a description, and a function that converts the text or returns false.
local values = {
  path = {"a path", function(text) return text ~= "" and text end},
  count = {"a positive integer", function(text)
    local n = text:find "^%d+$" and math.tointeger(tonumber(text))
    return n and n > 0 and n
  end},
  number = {"a non-negative number", function(text)
    return text:find "^%d+%.?%d*$" and tonumber(text)
  end},
  amp = {"off, bf16 or fp16", function(text)
    return (text == "off" or text == "bf16" or text == "fp16") and text
  end},
}

-- Options of luatrain that make no sense here, because a measured run leaves nothing behind.
local FOR_RUNS = {"--out", "--resume", "--save-every", "--max-steps", "--log"}

-- Parses the options before the script into `o`, which has the defaults. kinds: {name = kind of its
-- value, or true for a switch}. Returns the index of the script in list, or nil.
function bench.read_options(list, kinds, o, help)
  for _, name in ipairs(FOR_RUNS) do
    if command_line.has(name) then
      refuse("%s has no effect here: a benchmark keeps only what --json FILE writes", name)
    end
  end
  local wants = {}
  for name, kind in pairs(kinds) do wants[name] = values[kind] or kind end
  local i = read_flags(list, wants, o, help, refuse)
  return list[i] and i
end

function bench.remove_folder(folder)
  checkpoint.remove(folder.path)
  os.remove(folder.path .. "/.lock")
  os.remove(folder.path)
end

-- Makes a temporary folder for the files of a run. The owner removes it; otherwise the garbage
-- collector does.
function bench.temporary_folder()
  local is_made, path = pcall(os.tmpname)
  if not is_made then
    local file <close> = io.open "/dev/null"
    core.fail(file and "EENV" or "ENOMEM", "cannot create a temporary folder: "
              .. (file and path or "too many open files"))
  end
  os.remove(path)
  return setmetatable({path = path}, {__gc = bench.remove_folder})
end

-- Changes the settings of the run to be measured: it has at least `steps` steps, writes only to the
-- temporary folder, and prints nothing.
function bench.change(settings, steps, folder, amp)
  local per_epoch = (#settings.train + settings.batch - 1) // settings.batch
  settings.epochs = math.max(settings.epochs, steps // per_epoch + 1)
  settings.out, settings.out_is_the_scripts, settings.resume = folder.path, true, false
  settings.max_steps, settings.save_every = nil, nil
  settings.log, settings.quiet = "text", true
  settings.amp = amp or settings.amp
  if settings.amp == "auto" then
    core.fail("EUSAGE", "bench: amp auto chooses the faster precision; measure off and bf16")
  end
end

local OPTIONS = {steps = "count", amp = "amp", json = "path", baseline = "path", margin = "number"}

-- Compares r with an earlier result and prints the lines. ESCRIPT if it is slower than the margin
-- allows.
local function compare(r, before, o)
  print("\n" .. table.concat(bench.compare(r, before, o.baseline), "\n"))
  if r.images_per_s < (1 - o.margin / 100) * before.images_per_s then
    core.fail("ESCRIPT", ("bench: slower than %s by more than %g %% (--margin)")
              :format(o.baseline, o.margin))
  end
end

local MISSING = "the script is missing: luatrain bench train_lenet.lua; see luatrain bench --help"

-- The index of the script among the arguments after `bench`.
function bench.script_index(...)
  return bench.read_options({...}, OPTIONS, {}, HELP:format(WARM_UP)) or refuse(MISSING)
end

-- Prepares `luatrain bench`: measures the script's first run, which then ends the script. Takes the
-- arguments after `bench`. Returns the index of the script among them, and a function to call after
-- the script.
function bench.attach(...)
  local o = {steps = 20, margin = 5}
  local script = bench.read_options({...}, OPTIONS, o, HELP:format(WARM_UP)) or refuse(MISSING)
  local name = select(script, ...)
  local before = o.baseline and bench.read(o.baseline, bench.COMPARED)
  if o.json then bench.want_file(o.json) end
  local meter, folder, parameters = bench.meter(WARM_UP), bench.temporary_folder(), nil
  local observer = {begin_step = function() meter:begin_step() end}

  function observer.end_step(_, ...)
    meter:end_step(...)
    if #meter.rates >= o.steps then core.fail("EDONE", "all steps are measured") end
  end

  function observer.stop(_, reason) core.fail("ESTOPPED", "bench: stopped by " .. reason) end

  function core.on_run(settings)
    bench.change(settings, WARM_UP + o.steps, folder, o.amp)
    o.amp, parameters = settings.amp, settings.net:count()
    return observer
  end

  local function finish()
    bench.remove_folder(folder)  -- before limits(), where a signal ends the process
    if #meter.rates < o.steps then
      core.fail("ESCRIPT", ("bench: %s %s"):format(
        name, parameters and "ended before all steps were measured; try fewer --steps"
              or "calls neither lt.run nor lt.fit, so there is no step to measure"))
    end
    local r = bench.result(meter, bench.limits())
    r.script, r.amp, r.parameters = name:match "[^/]*$", o.amp, parameters
    print(text_of(r))
    if o.json then bench.write(o.json, r) end
    if before then compare(r, before, o) end
  end
  return script, finish
end

-- `luatrain bench dispatch`: prints the overhead of a small op in nanoseconds, the best of `rounds`
-- rounds of n ops.
function bench.dispatch(rounds, n)
  local a, b = constructors.ones{1}, constructors.ones{1}
  local function run_adds()
    local best = math.huge
    for _ = 1, rounds do
      local start = os.clock()
      for _ = 1, n do local _ = a + b end
      best = math.min(best, 1e9 * (os.clock() - start) / n)
    end
    return best
  end
  local plain = run_adds()
  a:requires_grad()
  print(("Lua  %7.0f ns per op on the tape, %7.0f without"):format(run_adds(), plain))
end

return bench
