-- bench.lua - how fast a training is on this machine, op by op, and how near to what the machine
-- can do: `luatrain bench script.lua`.
--
-- The script's first run is watched for some steps. Steps are timed as the run does it, from the
-- end of one to the end of the next, the wait for data included; and every op within, by the timer
-- of the library. What the machine can do is measured afterwards in the same process: the rate of a
-- product of large matrices, and the bandwidth of the fastest copy of a large tensor.
--
-- The bytes of an op are those of each tensor that it reads and of each that it writes; one that is
-- written in place is both. Batch norm reads twice what the last cache cannot hold, for its sums
-- and for its results. An op cannot be done before its multiply-adds are, at the rate of the
-- product, nor before its bytes have moved, at the bandwidth of the copy. The longer of the two
-- binds it, and `of_limit` is that time as a share of what it took. Tensors that stay in a cache
-- move faster than a copy does: small ones may be beyond 1.

local core = ...
local checkpoint = require "luatrain.train.checkpoint"
local command_line = require "luatrain.train.command_line"
local flops_of = require "luatrain.commands.flops"
local json = require "luatrain.json"
local read_flags = require "luatrain.commands.flags"
local sorted = require "luatrain.keys"
local ops, makers = core.ops, core.makers

local bench = {clock = core.clock}

local WARM_UP = 5                 -- steps before those that are timed
local SLOWER, LEAST = 1.1, 0.01   -- an op that takes so much more time than before is named, if it
                                  -- has so much of the step
local SHOWN = 0.99                -- rows of the table are shown until they have this of the time

local function refuse(...) core.fail("EUSAGE", "bench: " .. string.format(...)) end
bench.refuse = refuse

-- ==== The machine ================================================================================

local function cpu_model()
  local file <close> = io.open("/proc/cpuinfo", "r")
  return file and file:read "a":match "model name%s*:%s*([^\n]*)" or "unknown CPU"
end

-- What it is, for results of all kinds.
function bench.machine()
  return {version = core.version, cpu = cpu_model(), backend = core.backend(),
          threads = core.threads()}
end

-- Whether tensors go to an accelerator.
local function on_device() return makers.zeros{1}.device ~= "cpu" end

-- The least seconds of some calls of f, for whose end a device is waited.
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

-- FLOP a second of a product of square matrices, so large that it takes a moment.
local function gemm_rate(dtype)
  local n, seconds = 128
  repeat
    n = 2 * n
    local x, y = makers.randn{n, n}:cast(dtype), makers.randn{n, n}:cast(dtype)
    seconds = least(5, function() ops.matmul(x, y) end)
  until seconds > 0.05 or n == 8192
  return 2 * n ^ 3 / seconds
end

-- Bytes read and written a second: by a copy, which is streamed past the caches, or by an op that
-- goes over a tensor, whichever moves more.
function bench.copy_rate()
  local x, y = makers.zeros{1 << 26}, makers.zeros{1 << 26}
  local seconds = math.min(least(4, function() y:copy(x) end), least(4, function() ops.neg(x) end))
  return 2 * 4 * x:count() / seconds
end

-- Bytes of the largest cache of a processor; 0 where the system does not say, and for a device.
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

-- What the ops of this machine are held against. CPUs compute f16 in f32.
function bench.limits()
  collectgarbage()
  return {gemm = {f32 = gemm_rate "f32", bf16 = gemm_rate "bf16",
                  f16 = on_device() and gemm_rate "f16" or nil},
          copy = bench.copy_rate(), cache = cache_bytes()}
end

-- ==== Measuring ==================================================================================

local Meter = {}
Meter.__index = Meter

-- What steps take: begin_step() and end_step() go around each. The first warm_up do not count.
function bench.meter(warm_up)
  return setmetatable({left = warm_up, rates = {}, images = 0, seconds = 0.0, waited = 0.0,
                       peak_rss = 0, peak_tensors = 0}, Meter)
end

function Meter:begin_step() core.time_ops(self.left == 0) end

-- images: in the step. seconds: what it took, of which it waited for data.
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

-- Takes the step f(...) on so many images. Returns the seconds so far.
function Meter:step(images, f, ...)
  self:begin_step()
  local before = core.clock()
  core.step(f, ...)
  self:end_step(images, core.clock() - before, 0.0)
  return self.seconds
end

-- Images a second of steps f(...), whose ops are not timed, so that a device need not be waited
-- for: that is done before and behind so many steps alone, as often as takes `seconds`, three times
-- at least. The median and the best of these.
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

-- Bytes that batch norm reads a second time: x, and backwards dy as well.
local function read_again(row, limits)
  if row.op ~= "batch_norm" or row.bytes / row.calls <= limits.cache then return 0 end
  local bytes = row.calls * (row.dtype == "f32" and 4 or 2) * (row.backward and 2 or 1)
  for _, dim in ipairs(row.shapes[1]) do bytes = bytes * dim end
  return bytes
end

-- Adds flops, which limit binds it, and its share of that one; all per step.
local function rate_op(row, steps, limits)
  local gradients = row.backward and 0 or 1
  for _, name in ipairs(row.wanted) do
    if name ~= "b" then gradients = gradients + 1 end      -- a bias takes no products
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

-- The middle and the largest of a list of numbers.
function bench.spread(list)
  local sorted = table.move(list, 1, #list, 1, {})
  table.sort(sorted)
  local half = #sorted // 2
  local middle = #sorted % 2 == 1 and sorted[half + 1] or (sorted[half] + sorted[half + 1]) / 2
  return middle, sorted[#sorted]
end

-- Everything that is known of the steps: what --json writes. Ops in the order of their time;
-- fractions of the step's time: outside of ops, waiting for data, and what the ops would take if
-- each took no longer than its limit.
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

-- "conv2d back x,w": with the gradients, where their number decides how much there is to do.
local function op_text(row)
  local text = row.op .. (row.dtype == "f32" and "" or " " .. row.dtype)
  if not row.backward then return text end
  return text .. " back" .. (row.flops > 0 and " " .. table.concat(row.wanted, ",") or "")
end

-- "8x8x3 16x3x3x3 > 8x8x16"; one that is like the first is left out.
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

-- Lists of texts as lines of columns: so many to the left, the rest to the right.
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

-- The ops of a result as a table, per step.
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
    ("%.1f %% of it outside of ops, with %.1f %% waiting for data; with each op at its limit it "
     .. "would take %.0f %%"):format(100 * r.outside, 100 * r.waiting,
                                     100 * (r.of_limit + r.outside)),
    ("memory at most %.2f GB, tensors %.2f GB of it"):format(r.peak_rss_bytes / 1e9,
                                                            r.peak_tensor_bytes / 1e9))
end

-- ==== An earlier result ==========================================================================

local function percent(now, before) return ("%+.1f %%"):format(100 * (now / before - 1)) end

-- What compare() reads of an earlier result, by example: {item} is a list.
bench.COMPARED = {
  images_per_s = 0, parameters = 0, batch = 0, machine = {}, ops = {{op = "", seconds = 0}},
  limits = {gemm = {f32 = 0, bf16 = 0}, copy = 0}}

-- The name of what a value has not, or has of another type than `wanted`; nil when it has all.
local function lack(value, wanted, name)
  if type(value) ~= type(wanted) then return name end
  if type(wanted) ~= "table" then return nil end
  for _, key in ipairs(sorted(wanted[1] and value or wanted)) do
    local missing = lack(value[key], wanted[1] or wanted[key], (name and name .. "." or "") .. key)
    if missing then return missing end
  end
end

-- The value in a file that --json wrote; `wanted` is an example of it.
function bench.read(path, wanted)
  local file, why = io.open(path, "rb")
  if not file then refuse("cannot read %s", why) end
  local ok, value = pcall(json.read, file:read "a" or "")
  file:close()
  if not ok then refuse("%s: %s", path, checkpoint.reason(value)) end
  local missing = lack(type(value) == "table" and value or {}, wanted)
  if missing then refuse("%s is no result of this benchmark: it has no '%s'", path, missing) end
  return value
end

-- Refuses a path that write() could not write, before time is spent on what is to be there.
function bench.want_file(path)
  local file, why = io.open(path, "ab")
  if not file then refuse("cannot write %s", why) end
  file:close()
end

function bench.write(path, value) core.write_file(path, json.text(value, 2) .. "\n") end

-- How the machine, and the precision, differ from what they were.
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

-- Lines that say how a result differs from an earlier one of the same net: its speed, the machine,
-- and the ops that have become slower and matter. Fails when they cannot be compared.
function bench.compare(r, before, who)
  if r.parameters ~= before.parameters or r.batch ~= before.batch then
    refuse("%s: it was another net or batch before: %d parameters, %g images", who,
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
usage: luatrain [options] bench [options of bench] script.lua [options of the script]

Times some steps of the script's training, op by op, and what the machine can do.

  --steps N          how many, after %d to warm up (20)
  --amp PRECISION    off, bf16 or fp16 (what the script says)
  --json FILE        writes everything there
  --baseline FILE    compares with what --json wrote before; when slower, the exit code is 1
  --margin PERCENT   by how much it must be slower for that (5)
  --help             this text

`luatrain bench dispatch` measures what an op costs beside its arithmetic; `luatrain bench dist`
what it costs to train on several ranks.]]

-- What values of options are to be: in words, and how to read them.
local values = {
  path = {"a path", function(text) return text ~= "" and text end},
  count = {"a whole number from 1 up", function(text)
    local n = text:find "^%d+$" and math.tointeger(tonumber(text))
    return n and n > 0 and n
  end},
  number = {"a number from 0 up", function(text)
    return text:find "^%d+%.?%d*$" and tonumber(text)
  end},
  amp = {"off, bf16 or fp16", function(text)
    return (text == "off" or text == "bf16" or text == "fp16") and text
  end},
}

-- What luatrain is told about a run means nothing to one that ends when all is measured.
local FOR_RUNS = {"--out", "--resume", "--save-every", "--max-steps", "--log"}

-- Reads options before the script, {name = kind of value} or true for one without. What is not
-- given is as in `o`. Returns which argument is the script, if there is one.
function bench.read_options(list, kinds, o, help)
  for _, name in ipairs(FOR_RUNS) do
    if command_line.has(name) then
      refuse("%s is for a run that stays; of this one only what --json FILE writes does", name)
    end
  end
  local wants = {}
  for name, kind in pairs(kinds) do wants[name] = values[kind] or kind end
  local i = read_flags(list, wants, o, help, refuse)
  return list[i] and i
end

-- A folder for what a run writes. It is removed by its owner, or goes when the object does.
function bench.remove_folder(folder)
  checkpoint.remove(folder.path)
  os.remove(folder.path .. "/.lock")
  os.remove(folder.path)
end

function bench.passing_folder()
  local path = os.tmpname()
  os.remove(path)
  return setmetatable({path = path}, {__gc = bench.remove_folder})
end

-- The settings of the run that is watched: it leaves nothing, and is long enough.
function bench.change(settings, steps, folder, amp)
  local per_epoch = (#settings.train + settings.batch - 1) // settings.batch
  settings.epochs = math.max(settings.epochs, steps // per_epoch + 1)
  settings.out, settings.out_is_the_scripts, settings.resume = folder.path, true, false
  settings.max_steps, settings.save_every = nil, nil
  settings.log, settings.quiet = "text", true
  settings.amp = amp or settings.amp
  if settings.amp == "auto" then
    core.fail("EUSAGE", "bench: amp auto takes what is faster; off and bf16 show that here")
  end
end

local OPTIONS = {steps = "count", amp = "amp", json = "path", baseline = "path", margin = "number"}

-- Prints how r differs from an earlier result; fails when it is slower by more than the margin.
local function compare(r, before, o)
  print("\n" .. table.concat(bench.compare(r, before, o.baseline), "\n"))
  if r.images_per_s < (1 - o.margin / 100) * before.images_per_s then
    core.fail("ESCRIPT", ("bench: slower than %s by more than %g %% (--margin)")
              :format(o.baseline, o.margin))
  end
end

-- From now on the first run is measured, and ends the script. Takes the arguments after `bench`;
-- returns which of them is the script, and what is to be called when it has ended.
function bench.attach(...)
  local o = {steps = 20, margin = 5}
  local script = bench.read_options({...}, OPTIONS, o, HELP:format(WARM_UP)) or refuse(
    "a script must be given: luatrain bench train_lenet.lua; luatrain bench --help says more")
  local name = select(script, ...)
  local before = o.baseline and bench.read(o.baseline, bench.COMPARED)
  if o.json then bench.want_file(o.json) end
  local meter, folder, parameters = bench.meter(WARM_UP), bench.passing_folder(), nil
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
    bench.remove_folder(folder)  -- from now on a signal ends the process
    if #meter.rates < o.steps then
      core.fail("ESCRIPT", ("bench: %s %s"):format(
        name, parameters and "ended before all steps were measured; look at --steps"
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

-- `luatrain bench dispatch`: the least nanoseconds of an op, of some rounds.
function bench.dispatch(rounds, n)
  local a, b = makers.ones{1}, makers.ones{1}
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
  print(("Lua  %7.0f ns an op on the tape, %7.0f without"):format(run_adds(), plain))
end

return bench
