-- test_report.lua - the cost of runs: the end line, and `luatrain report`.
local lt = require "luatrain"
local cost = require "luatrain.train.cost"
local T = require "lt_test"

local here = io.popen("pwd"):read "l"
local START = '"device":"cpu","threads":1'

-- A run of two ranks that was killed in its second epoch and resumed with four.
local LINES = {
  '{"event":"start","t":1.000,"ranks":2,' .. START .. ',"target":0.75}',
  '{"event":"step","t":5.000,"step":1,"loss":3}',
  '{"event":"epoch","t":3600.000,"epoch":1,"top1":0.7}',
  '{"event":"save","t":3600.500,"step":1,"path":"a"}',
  '{"event":"warn","t":4000.000,"text":"slow"}',
  '{"event":"start","t":3601.000,"ranks":4,' .. START .. ',"target":0.75}',
  '{"event":"step","t":5000.000,"step":2,"loss":2}',
  '{"event":"epoch","t":7201.000,"epoch":2,"top1":0.76}',
  '{"event":"epoch","t":8000.000,"epoch":3,"top1":0.755}',
  '{"event":"epoch","t":8000.0',
}

local function write(lines)
  local folder = T.folder()
  T.write(folder .. "/metrics.jsonl", table.concat(lines, "\n"))
  return folder
end

T.test("device-hours of a run that was resumed with more ranks", function()
  local c = cost.of(write(LINES) .. "/metrics.jsonl")
  T.equal(c.reached, {epoch = 2, top1 = 0.76, seconds = 7201.0, device_s = 2 * 3601.0 + 4 * 3600})
  T.equal({c.best, c.seconds, c.device_s, c.start.ranks},
          {0.76, 8000.0, 2 * 3601.0 + 4 * 4399, 4})
  c = cost.of(write(LINES) .. "/metrics.jsonl", 0.7, 8100)
  T.equal({c.reached.epoch, c.reached.device_s, c.seconds}, {1, 7200.0, 8100})
  c = cost.of(write(LINES) .. "/metrics.jsonl", 0.77)
  T.equal({c.reached, c.best}, {nil, 0.76})
end)

T.test("device-hours of a job that workers join", function()
  local folder = write{
    '{"event":"start","t":1.000,"ranks":1,' .. START .. ',"target":0.75}',
    '{"event":"joined","t":11.000,"ranks":2,"host":"alpha","worker":1}',
    '{"event":"joined","t":21.000,"ranks":3,"host":"beta","worker":2}',
    '{"event":"lost","t":31.000,"ranks":2,"host":"alpha","worker":1}',
    '{"event":"epoch","t":41.000,"epoch":1,"top1":0.8}', ""}
  local c = cost.of(folder .. "/metrics.jsonl")
  T.equal({c.seconds, c.device_s, c.ranks}, {41.0, 11.0 + 20 + 30 + 20, 3})
  local text = T.ends(here, "report " .. folder, 0, "")
  assert(text:find("3 x cpu, 1 thread", 1, true), text)
end)

T.test("the end line of a run", function()
  local train, test = lt.data.open "synthetic:8x8x3/2/40"
  local function run(target)
    local net, out = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{192, 2}}, T.folder() .. "/out"
    lt.fit{net = net, train = train, test = test, optim = lt.optim.adam(net, {lr = 0.01}),
           epochs = 3, batch = 20, out = out, target = target}
    local ends = T.events(out, "end")
    T.equal({#ends, T.events(out, "start")[1].target}, {1, target})
    T.near(ends[1].device_hours * 3600, ends[1].wall_s, 0.002)
    return ends[1], T.events(out, "epoch")
  end
  local last, epochs = run(0.9)
  T.equal({last.target, last.target_epoch}, {0.9, 1})
  T.near(last.target_device_hours * 3600, epochs[1].t, 0.002)
  last = run(nil)
  T.equal({last.target, last.target_epoch, last.target_device_hours}, {})
  T.raises("lt.fit: 'target' must be a number from 0 to 1, but is 2", run, 2)
end)

local function report(arguments) return T.run(here, "report " .. arguments) end

T.test("luatrain report", function()
  local folder = write(LINES)
  local text, lines = T.ends(here, "report --peak 250 " .. folder, 0, ""), {}
  for line in text:gmatch "[^\n]+" do lines[#lines + 1] = line:gsub(" +", " ") end
  T.equal(lines[1], "run devices time top1 device-h V100-h")
  T.equal(lines[2], folder .. ", to 75 % 4 x cpu, 1 thread 2:00:01 76.00 % 6 12")
  local all = table.concat(lines, "\n")
  for _, line in ipairs{"Goyal et al. 2017 256 x P100, 21.2 Tflop/s 1:00:00 76.30 % 256 43.4",
                        "Yamazaki et al. 2019 2048 x V100, 125 Tflop/s 1:15 75.08 % 42.5 42.5",
                        "fast.ai and DIUx 2018 128 x V100, 125 Tflop/s 18:00 38.4 38.4",
                        "hybrid gradient computing 24 x V100, 125 Tflop/s 20:00 75.60 % 8 8"} do
    assert(all:find(line, 1, true), text)
  end
  text = report(("--target=0.9 %s %s"):format(folder, folder))
  local _, n = text:gsub(", to 90 %%%s+4 x cpu, 1 thread%s+not reached%s+76.00 %%\n", "")
  T.equal(n, 2)
end)

T.test("invalid arguments and logs", function()
  local function refused(arguments, wanted)
    T.equal({report(arguments)}, {"luatrain: report: " .. wanted .. "\n", 2})
  end
  local folder = write{'{"event":"start","t":1.000,"ranks":2,' .. START .. '}', ""}
  refused("", "name the folder of a run, as in luatrain report runs/train-1")
  refused(folder, folder .. " has no target; give one with --target 0.75")
  refused("/nowhere", "cannot read /nowhere/metrics.jsonl: No such file or directory")
  folder = write{""}
  refused(folder, folder .. "/metrics.jsonl is not from a run: it has no line \"start\"")
  for name, line in pairs{
    ranks = '"event":"start","t":1.0,"device":"cpu","threads":1',
    threads = '"event":"start","t":1.0,"ranks":1,"device":"cpu","threads":0.5',
    device = '"event":"start","t":1.0,"ranks":1,"device":7,"threads":1',
    target = '"event":"start","t":1.0,"ranks":1,"device":"cpu","threads":1,"target":"a"',
    t = '"event":"step","t":1.0.0,"step":1',
    top1 = '"event":"epoch","t":1.0,"epoch":1,"top1":"high"',
    epoch = '"event":"epoch","t":1.0,"top1":0.5',
  } do
    folder = write{"{" .. line .. "}", ""}
    refused(folder, ("%s/metrics.jsonl is not a valid log of a run: the line \"%s\" has an invalid "
                     .. "'%s'"):format(folder, line:match '^"event":"(%a+)"', name))
  end
  refused("--target 76 x", "--target must be a positive number up to 1, but is '76'")
  refused("--target", "--target requires a value")
  refused("--peak=fast x", "--peak must be a positive number of Tflop/s, but is 'fast'")
  refused("--taget 1 x", "unknown option '--taget' (did you mean '--target'?)")
  T.ends(here, "report --help", 0, "usage: luatrain report")
  T.equal({T.run(here, "--ranks 2 report x")},
          {"luatrain: report works on one rank, not on several\n", 2})
end)

T.finish()
