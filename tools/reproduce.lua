-- reproduce.lua - runs the experiments for the claims of docs/papers.md. tools/reproduce runs it.
--
-- A row is one claim of a paper. The rows of all papers are in docs/experiments/paper_*.lua, as
-- data: each file returns a list of rows with the fields below. It gets two arguments: a function
-- add(list, name, command, ...), which adds a run to a list and formats its command as
-- string.format does, and the verdict REPRODUCED.
--
--   name      of the row: the letter of the paper, and a word
--   claim     what the abstract says
--   minutes   {short = , full = }: planned time of all runs on two cores
--   timed     true: the row measures time, so nothing else should run on the machine
--   gpu       the command to run on GPUs; the row then has no runs
--   shares    the name of the row whose minutes, runs and figure it uses
--   runs      runs(full) returns a list of {name, command}. In a command, {luatrain}, {here} (the
--             folder of the rows), {tools}, {out} (the folder of the run), {cifar10}, {peer} and
--             {hosts} are replaced. `codes` lists exit codes other than 0 that are results, too
--   figure    figure(results, row) returns the row's figure, which may have several lines, and its
--             verdict; see Results below
--
-- A run that has ended leaves a mark, RUN.json in the folder of its row. It is not run again. An
-- interrupted run of luatrain has no mark, and resumes from its checkpoint in the same folder.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"
local log = require "luatrain.train.log"
local measure = require "measure"

local print, quote = measure.print, measure.quote
local BOOLEAN = {["--short"] = true, ["--full"] = true, ["--help"] = true}

-- Removes the words that are not flags from the command line, and returns them.
local function take_names()
  local names, i = {}, 1
  while arg[i] do
    if arg[i]:find "^%-" then
      i = i + ((BOOLEAN[arg[i]] or arg[i]:find "=") and 1 or 2)
    else
      names[#names + 1] = table.remove(arg, i)
    end
  end
  return names
end

local names = take_names()
local opt = lt.args{
  out = "runs/papers", short = false, full = false, cifar10 = os.getenv "CIFAR10" or "",
  peer = os.getenv "PEER" or "", hosts = "", rows = measure.folder .. "/../docs/experiments",
  help = {
    out = "folder of the runs",
    short = "run all rows that need no GPU, in at most eight hours on two cores; without it and "
            .. "without names, the rows are only listed",
    full = "the full experiments: more seeds, epochs and cases",
    cifar10 = "folder with CIFAR-10 (the variable CIFAR10)",
    peer = "a Python that has PyTorch (the variable PEER)",
    hosts = "a command that runs others on two linked hosts, hosta and hostb: see tools/bench "
            .. "pipeline --help",
    rows = "folder with the tables of rows, paper_*.lua",
  }}
if opt.short and opt.full then measure.refuse "--short and --full exclude each other" end

local NEEDS = {
  cifar10 = "CIFAR-10: give its folder with --cifar10 DIR, as in docs/data.md",
  peer = "a Python that has PyTorch: give it with --peer",
  hosts = "two linked hosts: give a command with --hosts that runs others there",
}

-- ==== Rows and runs ==============================================================================

local REPRODUCED = "reproduced"

local function add(list, name, command, ...) list[#list + 1] = {name, command:format(...)} end

local function read_rows()
  local list, by_name = {}, {}
  for _, letter in ipairs{"a", "b", "c", "d"} do
    local path = ("%s/paper_%s.lua"):format(opt.rows, letter)
    local file = io.open(path)
    if file then
      file:close()
      for _, row in ipairs(assert(loadfile(path))(add, REPRODUCED)) do
        list[#list + 1], by_name[row.name] = row, row
      end
    end
  end
  if #list == 0 then measure.refuse("--rows: %s has no paper_*.lua", opt.rows) end
  for _, row in ipairs(list) do
    local shared = by_name[row.shares] or {}
    for _, key in ipairs{"minutes", "timed", "runs", "figure"} do
      row[key] = row[key] or shared[key]
    end
  end
  return list, by_name
end

local rows, by_name = read_rows()
local level = opt.full and "full" or "short"

local function folder_of(row) return ("%s/%s/%s"):format(opt.out, level, row.shares or row.name) end

local function read_json(path)
  local file <close> = io.open(path, "rb")
  if not file then return nil end
  local ok, value = pcall(json.read, file:read "a")
  return ok and type(value) == "table" and value or nil
end

-- The runs of a row: {name, command, codes, out = the folder of the run, mark = or nil, is_other =
-- whether the mark is of another command, because the row has changed}.
local function runs_of(row)
  local list = row.runs and row.runs(opt.full) or {}
  for _, run in ipairs(list) do
    run.out = ("%s/%s"):format(folder_of(row), run[1])
    local mark = read_json(run.out .. ".json")
    run.is_other = mark and mark.command ~= run[2]
    run.mark = not run.is_other and mark or nil
  end
  return list
end

local function missing(list)
  local todo = {}
  for _, run in ipairs(list) do
    if not run.mark then todo[#todo + 1] = run end
  end
  return todo
end

-- ==== Results ====================================================================================

-- What figure() gets: the results of a row's runs, by their names.
local Results = {}
Results.__index = Results

-- The exit code of a run, and the seconds that it took.
function Results:code(name) return self.marks[name].code end
function Results:seconds(name) return self.marks[name].seconds end

-- The object that a run has written to {out}/result.json.
function Results:json(name)
  local path = ("%s/%s/result.json"):format(self.folder, name)
  return read_json(path) or measure.fail(1, "%s is missing or damaged", path)
end

-- What a run has printed.
function Results:text(name)
  local file <close> = assert(io.open(("%s/%s.txt"):format(self.folder, name)))
  return file:read "a"
end

-- The last event of a kind in a run's metrics.jsonl, or nil.
function Results:last(name, kind)
  local last
  for line in log.lines(("%s/%s/metrics.jsonl"):format(self.folder, name)) do
    if line:find(('{"event":"%s"'):format(kind), 1, true) == 1 then last = line end
  end
  return last and json.read(last)
end

-- The accuracy on the test set after the last epoch, in percent. A run that ended with an exit code
-- other than 0 counts as 10 %, like guessing one of ten classes.
function Results:top1(name)
  if self:code(name) ~= 0 then return 10.0 end
  local epoch = self:last(name, "epoch")
  return 100 * (epoch.test_top1 or epoch.top1)
end

-- The steps of a run: tables with the numbers of each.
function Results:steps(name)
  local list = {}
  for event in log.read(("%s/%s/metrics.jsonl"):format(self.folder, name)) do
    if event.event == "step" then list[#list + 1] = event end
  end
  return list
end

-- The mean of a field's values over all steps of a run.
function Results:mean(name, field)
  local sum, n = 0.0, 0
  for _, step in ipairs(self:steps(name)) do
    if step[field] then sum, n = sum + step[field], n + 1 end
  end
  return sum / n
end

-- The accuracies of the runs NAME-SEED for seeds from 0: their mean, its standard error (0 for one
-- seed), and both as text.
function Results:seeds(name)
  local list, sum, squares = {}, 0.0, 0.0
  while self.marks[("%s-%d"):format(name, #list)] do
    list[#list + 1] = self:top1(("%s-%d"):format(name, #list))
    sum = sum + list[#list]
  end
  local mean = sum / #list
  for _, value in ipairs(list) do squares = squares + (value - mean) ^ 2 end
  local deviation = #list > 1 and math.sqrt(squares / (#list - 1) / #list) or 0.0
  return mean, deviation,
         #list > 1 and ("%.2f +- %.2f %%"):format(mean, deviation) or ("%.2f %%"):format(mean)
end

-- Lists of cells as the lines of a table.
function Results.table(lines) return bench.columns(lines, 1) end

local function results_of(row, list)
  local results = setmetatable({folder = folder_of(row), marks = {}}, Results)
  for _, run in ipairs(list) do results.marks[run[1]] = run.mark end
  return results
end

-- ==== Running ====================================================================================

local function last_lines(path)
  local lines = {}
  for line in io.lines(path) do lines[#lines + 1] = "  " .. line end
  return table.concat(lines, "\n", math.max(#lines - 9, 1))
end

local function is_result(run, code)
  for _, known in ipairs(run.codes or {}) do
    if code == known then return true end
  end
  return code == 0
end

-- The command of a run for a shell. {hosts} stands for several words.
local function command_of(run)
  local words = {luatrain = measure.program(), here = opt.rows, tools = measure.folder,
                 out = run.out, cifar10 = opt.cifar10, peer = opt.peer}
  for key, word in pairs(words) do words[key] = quote(word) end
  words.hosts = opt.hosts
  return (run[2]:gsub("{(%w+)}", words))
end

-- Executes a run and leaves its mark. Returns false and prints why if it fails.
local function execute(run)
  if run.is_other then
    print("%s.json is of another command, from before the row was changed; remove it and %s, or "
          .. "name another folder with --out", run.out, run.out)
    return false
  end
  local command, began = command_of(run), os.time()
  print("%s: %s", run[1], command)
  local _, how, code = os.execute(("mkdir -p %s && { %s; } >%s 2>&1"):format(
    quote(run.out), command, quote(run.out .. ".txt")))
  if how == "signal" then code = 128 + code end
  if code == 75 or code == 130 then
    print("stopped; the same command continues")
    os.exit(75, true)
  elseif not is_result(run, code) then
    print("%s failed with exit code %d; the end of %s.txt:\n%s", run[1], code, run.out,
          last_lines(run.out .. ".txt"))
    return false
  end
  run.mark = {command = run[2], code = code, seconds = os.time() - began}
  bench.write(run.out .. ".json", run.mark)
  return true
end

local function time_text(minutes)
  return minutes < 90 and ("%.0f min"):format(math.ceil(minutes)) or ("%.1f h"):format(minutes / 60)
end

local function taken(list)
  local seconds = 0
  for _, run in ipairs(list) do seconds = seconds + run.mark.seconds end
  return log.duration(seconds)
end

local function show(row, list)
  if row.gpu then
    print("%s: needs GPUs (command ready)\n  %s", row.name, row.gpu)
    return
  end
  local figure, verdict = row.figure(results_of(row, list), row)
  print("\n%s\n\n%s: %s (%d runs, %s)", figure, row.name, verdict, #list, taken(list))
end

-- Says what the missing runs of a row need, if it is not given; else nil.
local function lacking(row)
  for _, run in ipairs(row.gpu and {} or missing(runs_of(row))) do
    for key, text in pairs(NEEDS) do
      if opt[key] == "" and run[2]:find("{" .. key .. "}", 1, true) then return text end
    end
  end
end

-- Runs what is missing of a row and prints its figure. Returns false if a run fails.
local function reproduce(row)
  local list = runs_of(row)
  local todo = missing(list)
  print("%s: %s", row.name, row.claim)
  if #todo > 0 then
    print("%d of %d runs to do, about %s%s", #todo, #list,
          time_text(row.minutes[level] * #todo / #list),
          row.timed and "; measures time, so nothing else should run" or "")
  end
  for _, run in ipairs(todo) do
    if not execute(run) then return false end
  end
  show(row, list)
  return true
end

-- ==== Main =======================================================================================

local function state_of(row)
  if row.gpu then return "needs GPUs" end
  local list = runs_of(row)
  local done = #list - #missing(list)
  if done == 0 then return "not run here" end
  return done < #list and ("%d of %d runs"):format(done, #list) or "took " .. taken(list)
end

local function list_rows()
  local lines, total = {{"row", "short", "full", "here, " .. level, "claim"}}, 0
  for _, row in ipairs(rows) do
    local minutes = row.minutes or {}
    total = total + (not row.shares and minutes.short or 0)
    lines[#lines + 1] = {row.name, minutes.short and time_text(minutes.short) or "",
                         minutes.full and time_text(minutes.full) or "", state_of(row), row.claim}
  end
  local widths = {0, 0, 0, 0}
  for _, line in ipairs(lines) do
    for i, width in ipairs(widths) do widths[i] = math.max(width, #line[i]) end
  end
  local row_text = measure.row_of(("%%-%ds  %%%ds  %%%ds  %%-%ds  %%s"):format(
    table.unpack(widths)))
  for _, line in ipairs(lines) do print((row_text(table.unpack(line)))) end
  print("\n--short: about %s", time_text(total))
end

local function run_all()
  local good = true
  for _, row in ipairs(rows) do
    local why = lacking(row)
    if why then
      print("%s: left out; it needs %s", row.name, why)
    elseif not row.gpu then
      good = reproduce(row) and good
    end
    print ""
  end
  return good
end

local function run_named()
  local known = {}
  for i, row in ipairs(rows) do known[i] = row.name end
  for _, name in ipairs(names) do
    local row = by_name[name]
    if not row then
      measure.refuse("unknown row '%s'%s", name,
                     lt.check.hint(name, known, "; tools/reproduce lists the rows"))
    end
    local why = lacking(row)
    if why then measure.fail(4, "%s needs %s", name, why) end
  end
  local good = true
  for _, name in ipairs(names) do
    local row = by_name[name]
    if row.gpu then show(row) else good = reproduce(row) and good end
  end
  return good
end

if #names == 0 and not opt.short and not opt.full then
  list_rows()
else
  os.exit(#names > 0 and run_named() or #names == 0 and run_all(), true)
end
