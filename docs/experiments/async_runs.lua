-- async_runs.lua - the experiment with asynchronous training: starts the runs of async.lua, prints
-- tables of their accuracies and draws curves. All runs simulate workers of different speeds.
--
--   luatrain async_runs.lua --folder runs                               # Fashion-MNIST
--   luatrain async_runs.lua --folder runs --data cifar10:DIR
--   luatrain async_runs.lua --tables
--
-- Each finished run adds a line to async.csv, and runs that have a line are skipped. The experiment
-- can therefore be stopped at any time, and continues when it is started again. A run that was
-- stopped in the middle then starts anew: its folder is removed. The script first prints how long
-- the missing runs will take.
--
-- The learning rate of each rule is chosen with seed 0, by the accuracy on the held-out images
-- after the last epoch. Runs with the seeds 1, 2 and 3 then read the test set.
local lt = require "luatrain"
local log = require "luatrain.train.log"

local opt = lt.args{
  data = "fashion-mnist", folder = "runs", jobs = 1, luatrain = "luatrain", tables = false,
  help = {
    data = "fashion-mnist or cifar10:DIR",
    folder = "the runs' folders are written to this folder",
    jobs = "runs at a time, with one thread each",
    luatrain = "program that trains",
    tables = "only print the tables and draw the curves",
  }}

local HERE = arg[0]:match "^(.*/)[^/]*$" or ""
local RESULTS = HERE .. "async.csv"
local SPEEDS = "lognormal:0.2:1,1,1,1,2,2,3,4"
local RATES, COMMON = {0.002, 0.006, 0.02, 0.06}, 0.02
local MORE = {[0.002] = 0.0006, [0.06] = 0.2}      -- beside the ends of RATES
local SEEDS = {1, 2, 3}
local CHANCE = 0.1                                 -- accuracy of a run that diverged

local is_cifar = opt.data:find "^cifar10" ~= nil
local data = is_cifar and "cifar10" or "fashion"
local epoch_seconds = is_cifar and 120 or 8        -- until a run was measured

-- parallel: value of --parallel; false: trains without it, on batches of `batch`, or of 64
local variants = {
  {name = "sequential", parallel = false},
  {name = "synchronous", parallel = false, batch = 1024},
  {name = "asgd-0", parallel = "async=asgd", momentum = 0},
  {name = "asgd-0-drop", parallel = "async=asgd,drop=32", momentum = 0},
  {name = "asgd", parallel = "async=asgd"},
  {name = "asgd-clip", parallel = "async=asgd", clip = 1},
  {name = "sa", parallel = "async=sa"},
  {name = "dc-a-0", parallel = "async=dc-a", momentum = 0},
  {name = "dc-m", parallel = "async=dc-m"},
  {name = "gap", parallel = "async=gap"},
  {name = "dana", parallel = "async=dana"},
  {name = "ormo", parallel = "async=ormo"},
  {name = "ddc", parallel = "async=ddc"},
}
local by_name = {}
for _, v in ipairs(variants) do by_name[v.name] = v end

local in_table, at_other_n, long
if is_cifar then
  in_table = {"sequential", "asgd-0", "asgd", "dc-a-0", "dc-m", "dana", "ormo", "ddc"}
  at_other_n, long = {}, {}
else
  in_table = {}
  for _, v in ipairs(variants) do in_table[#in_table + 1] = v.name end
  at_other_n = {"asgd-0", "dc-m", "dana", "ormo", "ddc"}
  long = {"sequential", "asgd-0", "ormo", "ddc"}
end

-- ==== Results ====================================================================================

local function name_of(r)
  return ("%s %s n=%d lr=%g epochs=%d seed=%d"):format(data, r.variant, r.n, r.lr, r.epochs, r.seed)
end

-- By name: {held_out = list per epoch, test = accuracy or nil, diverged =, delay =, seconds =}.
local results = {}

local function read_results()
  local file = io.open(RESULTS)
  if not file then return end
  for line in file:lines() do
    local name, state, delay, seconds, test, held_out =
      line:match "^([^;]*);([^;]*);([^;]*);([^;]*);([^;]*);([^;]*)$"
    if name and name ~= "run" then
      local list = {}
      for value in held_out:gmatch "%S+" do list[#list + 1] = tonumber(value) end
      results[name] = {diverged = state == "diverged", delay = tonumber(delay),
                       seconds = tonumber(seconds), test = tonumber(test), held_out = list}
    end
  end
  file:close()
end

local function folder_of(r) return opt.folder .. "/" .. name_of(r):gsub("[ =]", "-") end

-- Reads the result of a run that has ended, and adds it to async.csv.
local function collect(r, code)
  local path = folder_of(r) .. "/metrics.jsonl"
  local held_out, test, seconds, delays, n = {}, nil, 0.0, 0, 0
  for event in log.read(path) do
    if event.event == "epoch" then
      held_out[#held_out + 1], test = ("%.4f"):format(event.top1), event.test_top1
    elseif event.event == "step" and event.delay then
      delays, n = delays + event.delay, n + 1
    elseif event.event == "end" then
      seconds = seconds + event.wall_s
    end
  end
  local diverged = code == 6                       -- the loss was not finite
  if code ~= 0 and not diverged then
    error(("%s ended with exit code %d"):format(folder_of(r), code))
  end
  local file <close> = assert(io.open(RESULTS, "a"))
  if file:seek "end" == 0 then
    file:write "run;state;mean delay;seconds;test;held out, per epoch\n"
  end
  file:write(("%s;%s;%.2f;%.0f;%s;%s\n"):format(
    name_of(r), diverged and "diverged" or "done", n > 0 and delays / n or 0, seconds,
    test and ("%.4f"):format(test) or "", table.concat(held_out, " ")))
end

local function accuracy(r)
  local result = results[name_of(r)]
  if not result then return nil end
  if result.diverged then return CHANCE, true end
  if r.seed > 0 then return result.test, false end
  return result.held_out[#result.held_out], false
end

-- ==== Runs =======================================================================================

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function command(r)
  local v = by_name[r.variant]
  local out = quote(folder_of(r))
  local words = {"rm -rf", out .. ";", quote(opt.luatrain), "--quiet", "--threads 1",
                 "--seed", r.seed, "--out", out}
  local function add(...)
    for _, word in ipairs{...} do words[#words + 1] = word end
  end
  if v.parallel then
    add("--parallel", v.parallel, "--simulate", ("workers=%d,delay=%s"):format(r.n, SPEEDS))
  end
  if is_cifar then add("--amp", "bf16") end
  add(quote(HERE .. "async.lua"), "--data", quote(opt.data), "--lr", r.lr)
  add("--epochs", r.epochs, "--batch", v.batch or 64, "--momentum", v.momentum or 0.9, "--clip",
      v.clip or 0)
  if r.seed > 0 then add "--test" end
  add(">/dev/null", "2>&1; echo $?")
  return table.concat(words, " ")
end

local function missing(list)
  local todo = {}
  for _, r in ipairs(list) do
    if not results[name_of(r)] then todo[#todo + 1] = r end
  end
  return todo
end

local function print_plan(todo)
  local epochs, seconds, measured = 0, 0.0, 0
  for _, r in ipairs(todo) do epochs = epochs + r.epochs end
  for name, result in pairs(results) do
    if name:find("^" .. data) and not result.diverged then
      seconds, measured = seconds + result.seconds, measured + #result.held_out
    end
  end
  if measured > 0 then epoch_seconds = seconds / measured end
  print(("%d runs, %d epochs: about %.0f minutes"):format(
    #todo, epochs, epochs * epoch_seconds / opt.jobs / 60))
  io.stdout:flush()
end

-- Makes all runs of a list that have no result yet.
local function make(list)
  local todo = missing(list)
  if opt.tables or #todo == 0 then return end
  print_plan(todo)
  local active = {}
  local function wait()
    local first = table.remove(active, 1)
    collect(first.run, first.pipe:read "n")
    first.pipe:close()
  end
  for _, r in ipairs(todo) do
    if #active == opt.jobs then wait() end
    active[#active + 1] = {run = r, pipe = io.popen(command(r))}
  end
  while #active > 0 do wait() end
  read_results()
end

local function spec(variant, n, lr, epochs, seed)
  return {variant = variant, n = n, lr = lr, epochs = epochs, seed = seed}
end

-- The learning rate with the highest accuracy on the held-out images; nil before all are tried.
local function best_rate(variant, n)
  local best, rate = -1, nil
  for _, lr in ipairs{0.0006, 0.002, 0.006, 0.02, 0.06, 0.2} do
    local value = accuracy(spec(variant, n, lr, 4, 0))
    if value and value > best then best, rate = value, lr end
  end
  return rate
end

local function tune(names, n)
  local list = {}
  for _, lr in ipairs(RATES) do
    for _, name in ipairs(names) do list[#list + 1] = spec(name, n, lr, 4, 0) end
  end
  make(list)
  list = {}
  for _, name in ipairs(names) do
    local more = MORE[best_rate(name, n)]
    if more then list[#list + 1] = spec(name, n, more, 4, 0) end
  end
  make(list)
end

local function final(names, n, epochs)
  local list = {}
  for _, seed in ipairs(SEEDS) do
    for _, name in ipairs(names) do
      local best = best_rate(name, epochs == 4 and n or 16)
      if best then list[#list + 1] = spec(name, n, best, epochs, seed) end
      if epochs == 4 and best ~= COMMON then
        list[#list + 1] = spec(name, n, COMMON, epochs, seed)
      end
    end
  end
  make(list)
end

-- ==== Tables =====================================================================================

local function mean_and_error(values)
  local sum, squares = 0.0, 0.0
  for _, value in ipairs(values) do sum = sum + value end
  local mean = sum / #values
  for _, value in ipairs(values) do squares = squares + (value - mean) ^ 2 end
  return mean, math.sqrt(squares / (#values - 1) / #values)
end

-- The mean of the accuracies in percent, with its standard error; and the mean difference from
-- ddc. "-" without all results.
local function cell(variant, n, lr, ddc_lr, epochs)
  local values, differences, diverged = {}, {}, 0
  for i, seed in ipairs(SEEDS) do
    local value, bad = accuracy(spec(variant, n, lr, epochs, seed))
    local ddc = accuracy(spec("ddc", n, ddc_lr, epochs, seed))
    if not value or not ddc then return "-", "-" end
    values[i], differences[i] = 100 * value, 100 * (ddc - value)
    if bad then diverged = diverged + 1 end
  end
  local text = ("%.2f +- %.2f"):format(mean_and_error(values))
  if diverged > 0 then text = ("%s (%d/%d)"):format(text, diverged, #SEEDS) end
  return text, ("%+.2f +- %.2f"):format(mean_and_error(differences))
end

local function print_table(title, names, n, epochs)
  local ddc = best_rate("ddc", epochs == 4 and n or 16)
  if not ddc then return end
  print(("\n%s\n%-12s %20s %18s %8s %20s %18s"):format(
    title, "rule", ("lr = %g"):format(COMMON), "ddc - rule", "best lr", "accuracy", "ddc - rule"))
  for _, name in ipairs(names) do
    local best = best_rate(name, epochs == 4 and n or 16)
    local one, minus = "-", "-"
    if epochs == 4 then one, minus = cell(name, n, COMMON, COMMON, epochs) end
    local two, minus_two = cell(name, n, best, ddc, epochs)
    print(("%-12s %20s %18s %8g %20s %18s"):format(name, one, minus, best, two, minus_two))
  end
end

-- ==== Curves =====================================================================================

-- The mean accuracy on the held-out images after each epoch, over the seeds; nil without all runs,
-- or if one diverged.
local function mean_curve(variant, n, lr, epochs)
  local sums = {}
  for _, seed in ipairs(SEEDS) do
    local result = results[name_of(spec(variant, n, lr, epochs, seed))]
    if not result or result.diverged then return nil end
    for i, value in ipairs(result.held_out) do sums[i] = (sums[i] or 0) + 100 * value / #SEEDS end
  end
  return sums
end

-- Draws the rules with their best learning rates.
local function draw(n, epochs)
  local series = {}
  for i, name in ipairs{"ddc", "ormo", "dana", "asgd-0", "asgd", "dc-m", "sequential",
                        "synchronous"} do
    local best = best_rate(name, n)
    local values = best and mean_curve(name, n, best, epochs)
    if values then series[#series + 1] = {name = name, values = values, color = i} end
  end
  if #series == 0 then return end
  local title = ("%s, %d workers: accuracy on held-out images"):format(
    is_cifar and "CIFAR-10" or "Fashion-MNIST", n)
  local file <close> = assert(io.open(("%sasync-%s-%d.svg"):format(HERE, data, epochs), "w"))
  file:write(dofile(HERE .. "async_svg.lua")(title, series))
end

read_results()
tune(in_table, 16)
final(in_table, 16, 4)
if #long > 0 then final(long, 16, 12) end
print_table(data .. ", 16 workers, 4 epochs", in_table, 16, 4)
if #long > 0 then print_table(data .. ", 16 workers, 12 epochs", long, 16, 12) end
draw(16, 4)
if #long > 0 then draw(16, 12) end
for _, n in ipairs(#at_other_n > 0 and {4, 8, 32} or {}) do
  tune(at_other_n, n)
  final(at_other_n, n, 4)
  print_table(("%s, %d workers, 4 epochs"):format(data, n), at_other_n, n, 4)
end
