-- test_bench.lua - benchmarks: op counts checked by hand, JSON, and `luatrain bench`. Measured
-- values are checked for plausibility, not for speed.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"
local T = require "lt_test"
local nn = lt.nn

local LIMITS = {gemm = {f32 = 1e11, bf16 = 2e11}, copy = 1e10, cache = 5000}

-- Returns the result of `steps` steps of f with 4 images each, after one unmeasured step.
local function measure(steps, f)
  local meter = bench.meter(1)
  for _ = 0, steps do meter:step(4, f) end
  return bench.result(meter, LIMITS)
end

-- The rows of an op in one direction.
local function rows(result, op, backward)
  local list = {}
  for _, row in ipairs(result.ops) do
    if row.op == op and row.backward == backward then list[#list + 1] = row end
  end
  return list
end

-- The only row of an op in one direction.
local function row(result, op, backward)
  local list = rows(result, op, backward)
  T.equal(#list, 1)
  return list[1]
end

T.test("rates of steps whose ops are not timed", function()
  local calls = 0
  local middle, best = bench.rates(4, 2, 0.0, function() calls = calls + 1 end)
  T.equal(calls, 6)
  T.equal(middle > 0 and best >= middle, true)
  local before = bench.clock()
  bench.rates(4, 1, 0.2, function() end)
  T.equal(bench.clock() - before >= 0.2, true)
end)

T.test("the ops of a small net, counted by hand", function()
  local net = nn.sequential{nn.conv2d{2, 3, 3, pad = 1}, lt.relu, nn.flatten(), nn.linear{192, 5}}
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  local x, y = lt.zeros{4, 8, 8, 2}, lt.tensor({0, 1, 2, 3}, {dtype = "i64"})
  local r = measure(3, function()
    lt.cross_entropy(net(x), y):backward()
    sgd:step()
  end)
  T.equal(r.steps, 3)
  T.equal(r.batch, 4.0)
  -- Outputs 4*8*8*3, each 3*3*2 multiply-adds. Bytes of x, w, b, y.
  local conv = row(r, "conv2d", false)
  T.equal(conv.calls, 1.0)
  T.equal(conv.dtype, "f32")
  T.equal(conv.shapes, {{4, 8, 8, 2}, {3, 3, 3, 2}, {4, 8, 8, 3}})
  T.equal(conv.wanted, {})
  T.equal(conv.flops, 2.0 * 4 * 8 * 8 * 3 * 18)
  T.equal(conv.bytes, 4.0 * (512 + 54 + 3 + 768))
  -- The batch has no gradient. Bytes of x, w, dy, dw, db.
  local back = row(r, "conv2d", true)
  T.equal(back.shapes, conv.shapes)
  T.equal(back.wanted, {"w", "b"})
  T.equal(back.flops, conv.flops)
  T.equal(row(r, "linear", false).flops, 2.0 * 4 * 5 * 192)
  T.equal(row(r, "linear", true).wanted, {"x", "w", "b"})
  T.equal(row(r, "linear", true).flops, 2 * 2.0 * 4 * 5 * 192)
  T.equal(row(r, "relu", false).bytes, 2.0 * 4 * 768)
  T.equal(row(r, "relu", false).flops, 0.0)
  T.equal(row(r, "relu", false).shapes, {{4, 8, 8, 3}, false, {4, 8, 8, 3}})
  T.equal(row(r, "cross_entropy", false).shapes, {{4, 5}, {4}, {}})
  -- Reads w and its gradient, writes w; a range of parameters may include padding.
  local n, bytes = 0, 0.0
  for _, update in ipairs(rows(r, "sgd_step", false)) do
    n, bytes = n + update.shapes[1][1] * update.calls, bytes + update.bytes
  end
  assert(n >= net:count() and n < net:count() + 64)
  T.equal(bytes, 3.0 * 4 * n)
  T.equal(#rows(r, "reshape", false), 0)       -- a view costs nothing
end)

T.test("times and fractions are plausible, and sorted", function()
  local x = lt.randn{64, 64}
  local r = measure(5, function() (x:matmul(x) + x):relu() end)
  local sum, at_limits, last = 0, 0, math.huge
  for _, op in ipairs(r.ops) do
    T.near(op.of_limit, math.max(op.flops / 1e11, op.bytes / 1e10) / op.seconds, 1e-9)
    assert(op.seconds > 0 and op.seconds <= last)
    sum, last = sum + op.seconds, op.seconds
    at_limits = at_limits + math.min(op.seconds, op.of_limit * op.seconds)
  end
  T.equal(#r.ops, 3)
  T.equal(row(r, "matmul", false).flops, 2.0 * 64 ^ 3)
  T.equal(row(r, "matmul", false).limit, "gemm")            -- 5.2 us for FLOP, 4.9 for bytes
  T.equal(row(r, "add", false).limit, "copy")
  assert(sum < r.step_s)
  T.near(r.outside, 1 - sum / r.step_s, 1e-9)
  T.near(r.of_limit, at_limits / r.step_s, 1e-9)
  assert(r.images_per_s <= r.best_images_per_s)
  T.equal(r.peak_tensor_bytes, lt.memory().peak)
  assert(r.peak_rss_bytes > r.peak_tensor_bytes and r.peak_tensor_bytes >= 4 * 64 * 64)
end)

T.test("rates and waits of steps", function()
  local meter = bench.meter(1)
  for _, step in ipairs{{4, 9.0, 9.0}, {4, 1.0, 0.25}, {2, 2.0, 0.5}, {6, 1.0, 0.0}} do
    meter:begin_step()
    meter:end_step(table.unpack(step))
  end
  local r = bench.result(meter, LIMITS)
  T.equal({r.steps, r.batch, r.step_s, r.waiting}, {3, 4.0, 4 / 3, 0.1875})
  T.equal({r.images_per_s, r.best_images_per_s, r.outside}, {4.0, 6.0, 1.0})
end)

T.test("equal calls share a row, others do not", function()
  local x, y = lt.zeros{8}, lt.zeros{2, 4}
  local r = measure(2, function()
    for _ = 1, 10 do x:relu() end
    y:relu()
    y:cast("bf16"):relu()
    lt.cat({x, x, x}, {axis = 1})
  end)
  local list = rows(r, "relu", false)
  table.sort(list, function(a, b)
    return a.calls > b.calls or a.calls == b.calls and a.dtype > b.dtype
  end)
  T.equal(#list, 3)
  T.equal(list[1].calls, 10.0)
  T.equal(list[1].bytes, 10 * 64.0)
  T.equal(list[2].shapes[1], {2, 4})
  T.equal(list[3].dtype, "bf16")
  T.equal(list[3].bytes, 32.0)
  T.equal(row(r, "cat", false).bytes, 2 * 96.0 + 3 * 8)     -- keeps three lengths for backward
end)

T.test("accumulating into a gradient also reads it", function()
  local w = lt.ones{8}:requires_grad()
  local both = measure(1, function()
    w:zero_grad();
    (w:exp() + w:tanh()):sum():backward()
  end)
  -- exp: y, dy, dw; tanh likewise; the second of them also reads dw.
  T.equal(row(both, "exp", true).bytes + row(both, "tanh", true).bytes, 7 * 32.0)
end)

T.test("more rows than the initial size of the table", function()
  local x = {}
  for i = 1, 700 do x[i] = lt.zeros{i} end
  local r = measure(1, function()
    for i = 1, 700 do x[i]:relu() end
    for i = 1, 700 do x[i]:relu() end
  end)
  local list, seen = rows(r, "relu", false), {}
  T.equal(#list, 700)
  for _, item in ipairs(list) do
    T.equal(item.calls, 2.0)
    seen[item.shapes[1][1]] = true
  end
  T.equal(#seen, 700)
end)

T.test("ops outside a step are not timed", function()
  local x, meter = lt.zeros{3}, bench.meter(0)
  x:relu()
  meter:step(4, function() x:exp() end)
  x:tanh()
  meter:step(4, function() x:exp() end)
  local r = bench.result(meter, LIMITS)
  T.equal(#r.ops, 1)
  T.equal(r.ops[1].calls, 1.0)
end)

T.test("batch norm reads a tensor twice if it exceeds the cache", function()
  local function bytes_of(rows, dtype, backward)
    local x = lt.ones{rows, 32}:cast(dtype):requires_grad()
    local scale, shift, mean, var = lt.ones{32}, lt.zeros{32}, lt.zeros{32}, lt.ones{32}
    local r = measure(2, function()
      lt.batch_norm(x, scale, shift, mean, var, {train = true}):sum():backward()
      x:zero_grad()
    end)
    return row(r, "batch_norm", backward).bytes
  end
  -- x, four parameters and buffers, y and two statistics; a large x is read again.
  T.equal(bytes_of(16, "f32", false), 4.0 * (2 * 16 * 32 + 6 * 32))
  T.equal(bytes_of(32, "f32", false), 4.0 * (3 * 32 * 32 + 6 * 32))
  T.equal(bytes_of(64, "bf16", false), 2.0 * 3 * 64 * 32 + 4 * 6 * 32)
  -- x, dy, scale, two statistics, dx; large x and dy are read again.
  T.equal(bytes_of(64, "f32", true), 4.0 * (5 * 64 * 32 + 3 * 32))
end)

T.test("median and maximum", function()
  local function spread(...) return {bench.spread{...}} end
  T.equal(spread(3, 1, 2), {2, 3})
  T.equal(spread(4, 1, 2, 3), {2.5, 4})
  T.equal(spread(7), {7, 7})
end)

-- ==== An earlier result ==========================================================================

-- Returns the fields of a result that a comparison reads. A step takes 1 s and has one op for each
-- item of seconds.
local function fake_result(seconds, amp)
  local ops = {}
  for name, s in pairs(seconds) do
    ops[#ops + 1] = {op = name, backward = false, dtype = "f32", shapes = {{3, 4}, false, {3, 4}},
                     wanted = {}, seconds = s, flops = 0}
  end
  table.sort(ops, function(a, b) return a.seconds > b.seconds end)
  return {images_per_s = 100.0, parameters = 7, batch = 4.0, step_s = 1.0, ops = ops, amp = amp,
          machine = {cpu = "A", threads = 2, backend = "B"}, limits = LIMITS}
end

T.test("a comparison shows how the machine and the settings differ", function()
  local now, before = fake_result({}, "off"), fake_result({}, "bf16")
  before.images_per_s, before.machine = 80.0, {cpu = "C", threads = 4, backend = "D"}
  before.limits = {gemm = {f32 = 2e11, bf16 = 1e11}, copy = 1e10}
  T.equal(bench.compare(now, now, "x"), {"x: 100 img/s, 100 before (+0.0 %); limits: product "
          .. "+0.0 % f32, +0.0 % bf16, copy +0.0 %"})
  T.equal(bench.compare(now, before, "x"), {"x: 100 img/s, 80 before (+25.0 %); limits: product "
          .. "-50.0 % f32, +100.0 % bf16, copy +0.0 %; cpu was C; threads was 4; backend was D; "
          .. "amp was bf16"})
  local function refused(key, value, message)
    local other = fake_result({}, "off")
    other[key] = value
    local _, why = pcall(bench.compare, now, other, "x")
    T.equal(why, "bench: x: the earlier result is of another net or batch: " .. message)
  end
  refused("parameters", 8, "8 parameters, 4 images")
  refused("batch", 16.0, "7 parameters, 16 images")
end)

T.test("ops that are 10 % slower and take 1 % of the step are named", function()
  local lines = bench.compare(fake_result{exp = 0.56, relu = 0.218, tanh = 0.011, log = 0.0099,
                                          neg = 0.1},
                              fake_result{exp = 0.50, relu = 0.200, tanh = 0.009, log = 0.0010,
                                          abs = 0.1}, "x")
  T.equal(table.concat(lines, "\n", 2), [[
  slower: exp 3x4: 560.000 ms, 500.000 before (+12.0 %)
  slower: tanh 3x4: 11.000 ms, 9.000 before (+22.2 %)]])
end)

T.test("the table of ops", function()
  local function op(name, seconds, flops, more)
    local row = {op = name, seconds = seconds, flops = flops, bytes = 2e6, calls = 3.0,
                 dtype = "f32", backward = false, wanted = {}, shapes = {{3, 4}, false, {3, 4}},
                 limit = "copy", of_limit = 0.125}
    for key, value in pairs(more or {}) do row[key] = value end
    return row
  end
  T.equal(bench.table_text{step_s = 0.1, outside = 0.2, ops = {
    op("conv2d", 0.06, 3e9, {backward = true, wanted = {"x", "w"}, dtype = "bf16", calls = 2.5,
                             shapes = {{1, 2}, {5, 6}, {7, 8}}, limit = "gemm", of_limit = 1.5}),
    op("sum", 0.0195, 0, {shapes = {{3, 4}, false, {}}}),
    op("relu", 0.0003, 0), op("neg", 0.0002, 0)}}, [[
op                    shapes         calls      ms     %  GFLOP/s  GB/s    of limit
conv2d bf16 back x,w  1x2 5x6 > 7x8    2.5  60.000  60.0       50   0.0  150 % gemm
sum                   3x4 > 1            3  19.500  19.5            0.1   12 % copy
2 more                                       0.500   0.5]])
end)

-- ==== JSON =======================================================================================

T.test("JSON is read back as it was written", function()
  local value = {list = {1, 2.5, "x", true, {}}, name = 'a "b" \\ \n\t\1 \u{e9}', no = false,
                 inner = {deep = {{1}, {-3e-20}}}}
  for lines = 0, 4 do T.equal(json.read(json.text(value, lines)), value) end
  T.equal(json.text{b = {1, 2}, a = 0.5}, '{"a":0.5,"b":[1,2]}')
  T.equal(json.text({b = {1, 2}, a = 0.5}, 1), '{\n  "a": 0.5,\n  "b": [1,2]\n}')
  T.equal(json.text{1 / 0, 0 / 0}, "[null,null]")
  T.equal(json.read ' {"a" : [ ] , "b":null,"c":"\\u00e9\\/\\\\u0041"} ',
          {a = {}, c = "\u{e9}/\\u0041"})
  T.equal(math.type(json.read "3"), "integer")
end)

T.test("invalid JSON is an error with its position", function()
  local function refused(text, wanted, at)
    T.fails(function() json.read(text) end,
            ("JSON: expected %s at byte %d"):format(wanted, at))
  end
  refused("", "a value", 1)
  refused("[1 2]", "a comma", 4)
  refused('{"a" 1}', "a colon", 5)
  refused("{a:1}", "a key", 2)
  refused('{"a":1,}', "a key", 8)
  refused('"a\\"', "a closing quote", 1)
  refused("[1]]", "the end", 4)
  refused('["\\u00e9\\u12 "]', "a character", 9)
  refused("[0x10]", "a value", 2)
  for _, number in ipairs{"01", "-00.5", "1.", "1.e5", "+1"} do refused(number, "a value", 1) end
  for text, at in pairs{['"a\n"'] = 3, ['"\0"'] = 2, ['{"\27": 1}'] = 3, ['"\\x"'] = 2} do
    refused(text, "a character", at)
  end
  refused("nan", "a value", 1)
  refused("[1", "a comma", 3)
end)

-- ==== luatrain bench =============================================================================

local folder = T.folder()

local function path(name) return folder .. "/" .. name end

local function write(name, text) T.write(path(name), text) end

local function read(name) return json.read(T.read(path(name))) end

-- Runs `luatrain bench ARGUMENTS`. Returns its output and exit code.
local function run(arguments) return T.run(folder, "bench " .. arguments) end

-- The same, and checks the exit code and that the output contains a text. Returns the output.
local function ends(arguments, code, message)
  return T.ends(folder, "bench " .. arguments, code, message)
end

-- Checks that all output is one message.
local function fails(arguments, code, message)
  T.equal({arguments, run(arguments)}, {arguments, ("luatrain: %s\n"):format(message), code})
end

-- An epoch has 3 steps, so evaluations and reports run between the measured steps. quick.lua does
-- not measure the limits of the machine, which takes seconds.
local TRAIN = [[
  local lt = require "luatrain"
  local train, test = lt.data.open "synthetic:8x8x2/5/12"
  local net = lt.nn.sequential{lt.nn.conv2d{2, 3, 3}, lt.nn.flatten(), lt.nn.linear{108, 5}}
  local sgd = lt.optim.sgd(net, {lr = 0.01})
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 1, batch = 4,
                             max_steps = 2, save_every = 1}
  print("in " .. run.folder)
  for epoch in run:epochs() do
    for x, y in run:batches() do
      run:step(function()
        local loss = lt.cross_entropy(net(x), y)
        loss:backward()
        sgd:step()
        return loss
      end)
    end
    run:report(run:evaluate(test))
  end
  print "not reached"]]
write("train.lua", TRAIN)
write("quick.lua", [[
  require "luatrain.commands.bench".limits = function()
    return {gemm = {f32 = 1e11, bf16 = 2e11}, copy = 1e10, cache = 5000}
  end
]] .. TRAIN)

T.test("a script's training and the machine's limits are measured, and leave no files", function()
  local out = ends("--steps 7 --json=out.json train.lua", 0, "7 steps of 4 images: ")
  assert(out:find "conv2d back w,b +4x8x8x2 3x3x3x2 > 4x6x6x3 +1 ")
  assert(not out:find "not reached")
  local r = read "out.json"
  T.equal(r.steps, 7)
  T.equal(r.script, "train.lua")
  T.equal(r.amp, "off")
  T.equal(r.parameters, 57 + 545)
  T.equal(r.batch, 4.0)
  T.equal(row(r, "conv2d", false).calls, 1.0)          -- excludes evaluations
  T.equal(row(r, "linear", true).calls, 1.0)
  T.equal(r.machine.version, lt.version)
  assert(r.waiting >= 0 and r.outside > 0 and r.outside < 1)
  local pipe = io.popen "cat /sys/devices/system/cpu/cpu0/cache/index?/size 2>/dev/null | sort -n"
  T.equal(r.limits.cache, 1024 * math.tointeger(pipe:read "a":match "(%d+)K\n$" or 0))
  pipe:close()
  for _, rate in ipairs{r.limits.gemm.f32, r.limits.gemm.bf16, r.limits.copy} do
    assert(rate > 1e7 and rate < 1e15, rate)
  end
  local made = out:match "in ([^\n]*)"
  T.equal(io.open(made .. "/metrics.jsonl"), nil)
  T.equal(io.open(made), nil)
  T.equal(io.open(path "runs"), nil)
end)

T.test("options for runs are refused", function()
  for _, flag in ipairs{"--out bench", "--resume=never", "--save-every 1", "--max-steps 5",
                        "--log json"} do
    T.equal({T.run(folder, flag .. " bench train.lua")},
            {("luatrain: bench: %s has no effect here: a benchmark keeps only what --json FILE "
              .. "writes\n"):format(flag:match "^[%a-]+"), 2})
  end
  T.equal(io.open(path "bench"), nil)
end)

T.test("--amp sets the precision of the run", function()
  ends("--steps 1 --amp bf16 --json bf16.json quick.lua", 0, "")
  local r = read "bf16.json"
  T.equal(r.amp, "bf16")
  T.equal(row(r, "conv2d", false).dtype, "bf16")
end)

T.test("comparison with an earlier result", function()
  local function baseline(factor, parameters, ...)
    local r = read "out.json"
    r.images_per_s, r.parameters = factor * r.images_per_s, parameters or r.parameters
    for _, op in ipairs(r.ops) do op.seconds = op.seconds / factor end
    write("then.json", json.text(r))
    return ends("--steps 7 --baseline then.json quick.lua", ...)
  end
  assert(not baseline(0.001, nil, 0, "then.json: "):find "slower")
  baseline(1000, nil, 1, "bench: slower than then.json by more than 5 % (--margin)")
  baseline(1, 7, 2, "bench: then.json: the earlier result is of another net or batch: 7 "
                    .. "parameters, 4 images")
end)

T.test("scripts that do not train, or fail", function()
  write("none.lua", "")
  write("fails.lua", "error 'it broke'")
  write("left.lua", [[
    local lt = require "luatrain"
    local train = lt.data.open "synthetic:2x2x1/2/40"
    local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{4, 2}}
    local run <close> = lt.run{net = net, optim = lt.optim.sgd(net, {lr = 0.1}), train = train,
                               epochs = 1, batch = 10}]])
  fails("none.lua", 1, "bench: none.lua calls neither lt.run nor lt.fit, so there is no step to "
                       .. "measure")
  fails("left.lua", 1, "bench: left.lua ended before all steps were measured; try fewer --steps")
  fails("fails.lua", 1, "fails.lua:1: it broke")
end)

-- A run that prints the name of its folder. It calls evaluate(net, x) in its evaluations, after
-- every fourth step.
local SIGNALLED = [[
  local lt = require "luatrain"
  local train = lt.data.open "synthetic:2x2x1/2/40"
  local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{4, 2}}
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  local function kill() io.popen("kill -INT $PPID"):close() end
  local function evaluate() end
  %s
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 1, batch = 10}
  print("in " .. run.folder)
  for epoch in run:epochs() do
    for x, y in run:batches() do
      run:step(function()
        local loss = lt.cross_entropy(net(x), y)
        loss:backward()
        sgd:step()
        return loss
      end)
    end
    run:evaluate(train, {loss = function(...) evaluate() return lt.cross_entropy(...) end})
  end]]

-- Returns the exit code and the output after its first line. The folder of the run must be gone.
local function run_signalled(lines)
  write("signalled.lua", SIGNALLED:format(lines))
  local out, code = run "--steps 3 signalled.lua"
  local made, rest = out:match "^in ([^\n]*)\n(.*)$"
  T.equal(io.open(made), nil)
  return code, rest
end

T.test("a signal during an evaluation, or after the run", function()
  T.equal({run_signalled "evaluate = kill"}, {75, "luatrain: bench: stopped by SIGINT\n"})
  T.equal({run_signalled "require 'luatrain.commands.bench'.limits = kill"}, {128 + 2, ""})
end)

T.test("a signal ends the measurement", function()
  write("killed.lua", [[
    local lt = require "luatrain"
    local train = lt.data.open "synthetic:2x2x1/2/400"
    local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{4, 2}}
    lt.fit{net = net, train = train, test = train, optim = lt.optim.sgd(net, {lr = 0.1}),
           epochs = 1, batch = 10, loss = function(...)
      if lt.steps() == 2 then io.popen("kill -TERM $PPID"):close() end
      return lt.cross_entropy(...)
    end}]])
  ends("killed.lua", 75, "luatrain: bench: stopped by SIGTERM\n")
end)

T.test("files that are not results", function()
  write("text.json", "hello")
  write("other.json", "{}")
  local function refused(name, message)
    fails("--baseline " .. name .. " train.lua", 2, "bench: " .. message)
  end
  refused("nowhere.json", "cannot read nowhere.json: No such file or directory")
  refused("text.json", "text.json: JSON: expected a value at byte 1")
  refused("other.json", "other.json is not a result of this benchmark: it has no 'batch'")
  local function damaged(change, missing)
    local r = read "out.json"
    change(r)
    write("damaged.json", json.text(r))
    refused("damaged.json",
            ("damaged.json is not a result of this benchmark: it has no '%s'"):format(missing))
  end
  damaged(function(r) r.images_per_s = "12" end, "images_per_s")
  damaged(function(r) r.limits.gemm.bf16 = nil end, "limits.gemm.bf16")
  damaged(function(r) r.ops[2].seconds = false end, "ops.2.seconds")
  damaged(function(r) r.ops[1] = 3 end, "ops.1")
  write("list.json", "[[]]")
  refused("list.json", "list.json is not a result of this benchmark: it has no 'batch'")
end)

T.test("files that cannot be written", function()
  fails("--json nowhere/x.json train.lua", 2, "bench: cannot write nowhere/x.json: No such file or "
                                              .. "directory")
  local _, full = run "--help >/dev/full"
  T.equal(full, 5)
end)

T.finish()
