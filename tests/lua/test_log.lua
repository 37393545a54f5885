-- test_log.lua - the log of a run: the lines of metrics.jsonl, reading and truncating the file, and
-- the output to a pipe. tests/tools/test_terminal tests terminals.
require "luatrain"
local T = require "lt_test"
local log = require "luatrain.train.log"
local thousands = require "luatrain.thousands"

local folder = T.folder()
local metrics = folder .. "/metrics.jsonl"

-- The lines that calls of a new log write, with all times replaced by 0.
local function lines(calls)
  os.remove(metrics)
  local l = log.new{folder = folder, quiet = true}
  calls(l)
  l:close()
  return (T.read(metrics):gsub('"t":%d+%.%d%d%d', '"t":0'))
end

local STEP = {
  step = 689, epoch = 2, epochs = 5, steps = 2345, samples = 88192, images = 60000, batch = 128,
  loss = 0.1, lr = 0.08,
  samples_per_s = 1180.26, data = 0.01, forward = 1 / 3, backward = 0.5, exposed_comm = 0.0,
  optimizer = 0.1, other = 0.056667}

-- Runs a script with a new log `l`. Returns its stdout followed by its stderr.
local function printed(settings, text)
  local script = folder .. "/script.lua"
  os.remove(metrics)
  T.write(script, ([[
    local log = require "luatrain.train.log"
    local l = log.new{folder = %q, %s}
    local function step(i, rate)
      l:step{step = i, epoch = (i - 1) // 10 + 1, epochs = 3, steps = 30, samples = 100 * i,
             images = 1000, batch = 100, loss = 0.5, lr = 0.1, samples_per_s = rate or 1000,
             data = 1.0}
    end
    %s
    l:close()]]):format(folder, settings, text))
  local pipe = assert(io.popen(("%s %s 2>%s/stderr"):format(T.program(), script, folder)))
  local out = pipe:read "a"
  pipe:close()
  return out .. T.read(folder .. "/stderr")
end

-- ==== The file ===================================================================================

T.test("a step is one line with its fields in order", function()
  T.equal(lines(function(l) l:step(STEP) end),
          '{"event":"step","t":0,"step":689,"epoch":2,"samples":88192,"loss":0.1,"lr":0.08,'
          .. '"samples_per_s":1180.260,"data":0.0100,"forward":0.3333,"backward":0.5000,'
          .. '"exposed_comm":0.0000,"optimizer":0.1000,"other":0.0567}\n')
end)

T.test("an epoch is one line", function()
  T.equal(lines(function(l)
            l:epoch{step = 469, epoch = 1, epochs = 5, samples = 60000, loss = 0.25, top1 = 0.875,
                    test_loss = 0.5, samples_per_s = 1000.0, wall_s = 60.0, top5 = 0.99}
          end),
          '{"event":"epoch","t":0,"step":469,"epoch":1,"samples":60000,"loss":0.25,"top1":0.875,'
          .. '"test_loss":0.5,"samples_per_s":1000.000,"wall_s":60.000,"top5":0.99}\n')
end)

T.test("strings are escaped, including invalid UTF-8", function()
  T.equal(lines(function(l)
            l:event("x", {text = 'a "b" \\ c\n\t\r\1', path = "gr\u{fc}n", script = "gr\xfcn"})
          end),
          '{"event":"x","t":0,"script":"gr\\u00fcn","path":"gr\u{fc}n",'
          .. '"text":"a \\"b\\" \\\\ c\\n\\t\\r\\u0001"}\n')
end)

T.test("nan and inf are null, true is true, lists are lists", function()
  T.equal(lines(function(l)
            l:event("x", {loss = 0 / 0, lr = math.huge, data = -math.huge, z = true, a = {1, 2.5}})
          end),
          '{"event":"x","t":0,"loss":null,"lr":null,"data":null,"a":[1,2.5],"z":true}\n')
end)

T.test("numbers are read back exactly, integers as integers", function()
  local values = {0, -1, math.maxinteger, 0.1, 1.0, -0.0, 1e300, 5e-324, 1 / 3, 2^53, 123456.789}
  for _ = 1, 500 do values[#values + 1] = (math.random() - 0.5) * 10.0 ^ math.random(-30, 30) end
  lines(function(l)
    for _, value in ipairs(values) do l:event("x", {value = value}) end
  end)
  local i = 0
  for event in log.read(metrics) do
    i = i + 1
    T.equal(math.type(event.value), math.type(values[i]))
    T.equal(event.value == values[i], true)
  end
  T.equal(i, #values)
end)

T.test("a log appends to an existing file", function()
  lines(function(l) l:event("one", {}) end)
  local l = log.new{folder = folder, quiet = true}
  l:event("two", {})
  l:close()
  T.equal(select(2, T.read(metrics):gsub("\n", "")), 2)
end)

T.test("time continues from the given seconds", function()
  local l = log.new{folder = folder, quiet = true, seconds = 1000.0}
  l:event("later", {})
  l:close()
  local t = tonumber(T.read(metrics):match '"later","t":([%d.]+)')
  assert(t >= 1000 and t < 1010, t)
end)

T.test("a missing folder", function()
  T.fails(function() log.new{folder = folder .. "/no"} end,
          ("cannot write %s/no/metrics.jsonl: No such file or directory"):format(folder))
  T.fails(function() log.new{folder = folder, mod = "json"} end,
          "log.new: unknown key 'mod' (did you mean 'mode'?)")
end)

-- ==== Reading and truncating =====================================================================

-- Epoch 1 ends with step 2, epoch 2 with step 4; the line of step 5 is torn.
local function write_run()
  T.write(metrics, table.concat({
    '{"event":"start","t":0.1,"script":"a \\"step\\":9 b","epochs":3}',
    '{"event":"step","t":0.2,"step":1,"epoch":1,"loss":2.5}',
    '{"event":"step","t":0.3,"step":2,"epoch":1,"loss":null}',
    '{"event":"epoch","t":0.4,"step":2,"epoch":1,"top1":0.5}',
    '{"event":"save","t":0.5,"step":2,"epoch":2}',
    '{"event":"step","t":0.6,"step":3,"epoch":2,"loss":1e-05}',
    '{"event":"step","t":0.7,"step":4,"epoch":2,"loss":1.5}',
    '{"event":"epoch","t":0.8,"step":4,"epoch":2,"top1":0.75}',
    '{"event":"step","t":0.9,"st'}, "\n"))
end

local function names()
  local list = {}
  for event in log.read(metrics) do
    list[#list + 1] = event.event .. (event.step or "")
  end
  return table.concat(list, " ")
end

T.test("reads events up to a torn line", function()
  write_run()
  T.equal(names(), "start step1 step2 epoch2 save2 step3 step4 epoch4")
  local next_event = log.read(metrics)
  T.equal(next_event(), {event = "start", t = 0.1, epochs = 3})
  T.equal(next_event(), {event = "step", t = 0.2, step = 1, epoch = 1, loss = 2.5})
  T.equal(next_event().loss, nil)
end)

T.test("cut removes the lines after a position", function()
  local function cut(step, epoch)
    write_run()
    log.cut(metrics, step, epoch)
    T.equal(T.read(metrics):sub(-2), "}\n")
    return names()
  end
  T.equal(cut(9, 9), "start step1 step2 epoch2 save2 step3 step4 epoch4")
  T.equal(cut(3, 2), "start step1 step2 epoch2 save2 step3")
  T.equal(cut(2, 2), "start step1 step2 epoch2 save2")
  T.equal(cut(2, 1), "start step1 step2")              -- saved before the report
  T.equal(cut(4, 2), "start step1 step2 epoch2 save2 step3 step4")
  T.equal(cut(0, 1), "start")
  os.remove(metrics)
  log.cut(metrics, 0, 1)                               -- no file: does nothing
  T.equal(io.open(metrics), nil)
end)

T.test("a damaged line does not hide the lines after it", function()
  local function cut(damaged, step)
    T.write(metrics, table.concat({
      '{"event":"step","t":0.2,"step":1,"epoch":1,"loss":2.5}', damaged,
      '{"event":"step","t":0.3,"step":2,"epoch":1,"loss":1.5}',
      '{"event":"step","t":0.4,"step":3,"epoch":1,"loss":0.5}', ''}, "\n"))
    log.cut(metrics, step, 1)
    return names()
  end
  for _, damaged in ipairs{'{"event":"step","t":0.9,"st', '', '\0\0',
                           '{"event":"epoch","epoch":7,'} do
    T.equal(cut(damaged, 3), "step1 step2 step3")
    T.equal(cut(damaged, 2), "step1 step2")
    T.equal(cut(damaged, 1), "step1")
  end
end)

-- ==== Console output =============================================================================

T.test("durations and thousands", function()
  T.equal(log.duration(51.4), "51 s")
  T.equal(log.duration(59.6), "1:00")
  T.equal(log.duration(192), "3:12")
  T.equal(log.duration(7510.2), "2:05:10")
  T.equal(log.duration(1e30), "3.16881e+22 years")
  T.equal(thousands(999), "999")
  T.equal(thousands(1180.4), "1,180")
  T.equal(thousands(-123456), "-123,456")
  T.equal(thousands(25557032), "25,557,032")
end)

T.test("the text at the start of a run", function()
  local fields = {
    version = "0.1.0", device = "cpu", backend = "reference kernels", ranks = 1, threads = 1,
    seed = 0, folder = "runs/train_resnet-1", parameters = 272186, images = 60000, height = 28,
    width = 28, channels = 1, classes = 10, batch = 128, epochs = 5, steps = 2345}
  local text = "luatrain 0.1.0  cpu  reference kernels  1 thread  seed 0  run runs/train_resnet-1\n"
    .. "272,186 parameters  60,000 images 28x28x1, 10 classes  batch 128  5 epochs = 2,345 steps"
  T.equal(log.start_text(fields), text)
  fields.step, fields.epoch = 1200, 3
  T.equal(log.start_text(fields), text .. "  resumed: step 1200, epoch 3")
  fields.epoch = nil                                   -- all epochs are done
  T.equal(log.start_text(fields), text .. "  resumed: step 1200")
  fields.ranks, fields.threads = 4, 2
  T.equal(log.start_text(fields):match "kernels.-seed", "kernels  4 ranks  2 threads each  seed")
end)

T.test("output to a pipe: the first step, epochs, notes and print", function()
  T.equal(printed("", [[
    l:note "a note"
    for i = 1, 10 do step(i) end
    print("printed 1")
    l:epoch{step = 10, epoch = 1, epochs = 3, loss = 0.334, top1 = 0.9091, test_loss = 0.253,
            samples_per_s = 1173.4, wall_s = 51.2, top5 = 0.99}
    step(11)]]), [[
a note
epoch 1/3  10 %  step 1/30  loss 0.500  lr 0.100  1,000 img/s
printed 1
epoch 1/3  loss 0.334  top1 90.91 %  top5 99.00 %  test loss 0.253  1,173 img/s  51 s
]])
end)

T.test("small, large and missing numbers stay readable", function()
  T.equal(printed("", [[
    l:step{step = 1, epoch = 1, epochs = 1, steps = 1000, samples = 4, images = 4000, batch = 4,
           loss = 0/0, lr = 1.2e-5, samples_per_s = 3.14}
    l:epoch{step = 1, epoch = 1, epochs = 1, loss = 123456.0, samples_per_s = 3.14, wall_s = 3.0}
    ]]), [[
epoch 1/1  0 %  step 1/1000  loss nan  lr 1.2e-05  3.1 img/s
epoch 1/1  loss 1.23e+05  3.1 img/s  3 s
]])
end)

T.test("quiet prints only warnings", function()
  T.equal(printed("quiet = true", [[
    l:note "a note"
    step(1)
    l:epoch{step = 1, epoch = 1, epochs = 3, loss = 0.3, samples_per_s = 1.0, wall_s = 1.0}
    l:warn "it is late"]]), "luatrain: warning: it is late\n")
end)

T.test("mode json: all events on stdout, nothing else", function()
  local out = printed('mode = "json"', [[
    l:note "a note"
    l:event("start", {seed = 1})
    step(1)
    print("printed", 1, nil)
    step(2)
    l:warn "it is late"]])
  local lines = T.read(metrics)
  T.equal(out, lines .. "printed\t1\tnil\nluatrain: warning: it is late\n")
  T.equal(lines:gsub('"t":[%d.]+', '"t":0'), [[
{"event":"start","t":0,"seed":1}
{"event":"step","t":0,"step":1,"epoch":1,"samples":100,"loss":0.5,"lr":0.1,"samples_per_s":1000,]]
    .. [["data":1.0000}
{"event":"step","t":0,"step":2,"epoch":1,"samples":200,"loss":0.5,"lr":0.1,"samples_per_s":1000,]]
    .. [["data":1.0000}
{"event":"warn","t":0,"text":"it is late"}
]])
end)

T.test("percentage and remaining time are computed from the samples", function()
  local out = printed("", [[
    local function step(step, epoch, samples, steps)
      l.shown = -math.huge                         -- makes the next line due
      l:step{step = step, epoch = epoch, epochs = 3, steps = steps, samples = samples,
             images = 1000, batch = 100, loss = 0.5, lr = 0.1, samples_per_s = 10}
    end
    step(1, 1, 100, 30)
    step(3, 1, 300, 30)
    step(4, 2, 1100, 24)                           -- epoch 1 was left after three steps
    step(5, 2, 1550, 7)]])                         -- and resumed with larger batches
  local texts = {}
  for line in out:gmatch "[^\n]+" do
    texts[#texts + 1] = line:match "  (%d+ %%)" .. (line:match "  eta.*" or "")
  end
  T.equal(texts, {"10 %", "30 %  eta 4:30", "10 %  eta 3:10", "55 %  eta 2:25"})
end)

T.test("closing a log restores print; closing twice is allowed", function()
  local before = print
  local l = log.new{folder = folder, quiet = true}
  T.equal(print ~= before, true)
  l:close()
  l:close()
  T.equal(print == before, true)
end)

T.test("a full disk causes one warning, and later lines are complete", function()
  local output = printed("quiet = true", [[
    l.file:close()
    l.file = io.open("/dev/full", "ab")
    l.file:setvbuf "no"
    step(1)
    step(2)
    l.file:close()
    os.remove(l.path)
    l.file = io.open(l.path, "ab")
    step(3)]])
  T.equal(output, ("luatrain: warning: cannot write %s: No space left on device; training "
                   .. "continues\n"):format(metrics))
  T.equal(names(), "step3")
end)

T.finish()
