-- gpu_check.lua - whether a device computes what the CPU does: a table, within ten minutes.
-- tools/gpu_check runs it.
--
-- Every part is done by processes of their own, which may die; this one never touches the device.
-- --device cpu is a dry run: the same, in small sizes.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"
local processes = require "processes"

local opt = lt.args{
  device = "cuda", out = "gpu_check.out", peer = os.getenv "PEER" or "", seconds = 600.0,
  small = false, parts = "properties,ops,layers,losses,ranks,sanitizer",
  help = {
    device = "what is to be checked; cpu: a dry run", out = "the folder for all that comes of it",
    peer = "a Python that has PyTorch, or the variable PEER: ops are held against it",
    seconds = "in which all is to end", small = "small sizes, as for the CPU",
    parts = "of the check: only these",
  }}

local folder = arg[0]:match "^(.*)/" or "."
local program = processes.program()
local small = opt.small or opt.device == "cpu"
local deadline = math.huge -- until the device is known to be there
local log = opt.out .. "/log.txt"
local result = {device = opt.device, parts = {}}
local good = true

local function refuse(...)
  io.stderr:write("tools/gpu_check: ", string.format(...), "\n")
  os.exit(2, true)
end

local function print(...)
  io.stdout:write(string.format(...), "\n")
  io.stdout:flush()
end

-- ==== Processes ==================================================================================

-- Starts a command that may take so many seconds, and what is left of all. What it says to stderr
-- goes to the file `errors` and to the log.
local errors = opt.out .. "/errors.txt"

local function limited(words, options, seconds)
  seconds = math.max(math.min(seconds, deadline - bench.clock()), 1) // 1 | 0
  return ("timeout -k 5 %d %s 2>%s"):format(seconds, processes.command(words, options),
                                            processes.quote(errors)), seconds
end

-- Its exit code, once it has been read to its end. 124: there was no more time.
local function ended(pipe, words)
  local _, how, code = pipe:close()
  if how == "signal" then code = 128 + code end
  local file <close> = io.open(errors, "r")
  local said = file and file:read "a" or ""
  local to <close> = io.open(log, "a")
  to:write(table.concat(words, " "), "\n", said, "exit ", code or 0, "\n\n")
  return code or 0, said
end

-- Runs a command. Its exit code, what it has said to stdout and to stderr.
local function run(words, options, seconds)
  if bench.clock() > deadline then return 124, "", "there was no more time" end
  local pipe = assert(io.popen(limited(words, options, seconds), "r"))
  local text = pipe:read "a"
  local code, said = ended(pipe, words)
  return code, text, said
end

-- The last sentence of luatrain's, or the last line, of what a process has said.
local function sentence(said, code)
  local last
  for line in said:gmatch "[^\n]+" do
    if line:find "^luatrain" or not (last and last:find "^luatrain") then last = line end
  end
  return last or "exit " .. code
end

-- What is said where kernels of our own do the work of NVIDIA's libraries: that is right, and not
-- what was to be checked. nil where they do their work.
local function without_libraries(said)
  local list = {}
  for _, work in ipairs{"convolutions", "matrix products"} do
    list[#list + 1] = said:match("%S+ computes " .. work .. " without [^\n]+")
  end
  return list[1] and table.concat(list, "; ")
end

local function on(device, script)
  return {program, "--device", device, folder .. "/" .. script}
end

-- ==== The table ==================================================================================

-- One line: what was checked, "good", "FAIL", or else why it was not, and more.
local function report(what, verdict, ...)
  local text = select("#", ...) > 0 and string.format(...) or ""
  print("%-38s %-5s %s", what, verdict, text)
  good = good and verdict ~= "FAIL"
  result.parts[#result.parts + 1] = {what = what, verdict = verdict, text = text}
end

local DTYPES = {"f32", "f16", "bf16"}

local function is_right(row)
  return not row.error and row.worst and row.worst <= 1
end

local function cell(row)
  if not row then return "" end
  if row.error then return "FAIL" end
  return row.worst and ("%.2f"):format(row.worst) or "nan"
end

-- A line for what was done in all dtypes.
local function report_rows(name, rows)
  local texts, verdict, why, count = {}, "good", "", 0
  for i, dtype in ipairs(DTYPES) do
    local row = rows[dtype]
    texts[i] = cell(row)
    count = math.max(count, row and row.cases or 0)
    if row and not is_right(row) then
      verdict, why = "FAIL", ("  %s: %s"):format(dtype, row.error or row.where)
    end
  end
  print("%-20s %5d  %8s %8s %8s  %s%s", name, count, texts[1], texts[2], texts[3], verdict, why)
  good = good and verdict == "good"
end

-- ==== The parts ==================================================================================

local parts = {}

-- What cuDNN says of the device, for plans that are made elsewhere. Only where a library is not
-- installed is there nothing to be asked.
function parts.properties()
  local what = "properties of the device"
  if opt.device == "cpu" then return report(what, "-", "the CPU has none") end
  local tool = program:match "^(.*)/" .. "/tests/cuda/properties"
  local code, text, said = run({tool, opt.device:match ":(%d+)$" or "0"}, nil, 60)
  local ok, found = pcall(json.read, text)
  if code ~= 0 or not ok then
    local missing = said:find "there is no lib%S+ on this machine"
    return report(what, missing and "-" or "FAIL", "%s", sentence(said, code))
  end
  local name = tostring(found.deviceName):lower():gsub("[^%w]+", "_")
  local file <close> = assert(io.open(("%s/%s.json"):format(opt.out, name), "w"))
  file:write(text)
  report(what, "good", "%s/%s.json, for tests/cuda", opt.out, name)
end

-- Where a walk has ended without being done: the row of what it was at, or nil if there is no more
-- to do.
local function row_of_end(at, code, said, seconds)
  local name, dtype = at:match "^(%S+) (%S+)$"
  local row = {name = name, dtype = dtype, cases = 0, late = code == 124}
  row.error = row.late and ("there was no more time after %d s"):format(seconds)
              or sentence(said, code)
  return row
end

-- Runs gpu_check_ops.lua to its end, behind the op in which it has died once more. each(row) gets
-- what it says. Returns how many rows, the last exit code, and what else is wrong.
local function walk(words, options, seconds, each)
  local until_then, count, at, without = bench.clock() + seconds, 0, "", nil
  while true do
    options.after = at ~= "" and at or nil
    local before, done = at, false
    local command, limit = limited(words, options, until_then - bench.clock())
    local pipe = assert(io.popen(command, "r"))
    for line in pipe:lines() do
      local ok, row = pcall(json.read, line)
      if ok and type(row) == "table" then
        done, at = done or row.done, row.begin or at
        if row.name then
          each(row)
          count = count + 1
        end
      end
    end
    local code, said = ended(pipe, words)
    without = without or without_libraries(said)
    if done then return count, code, without end
    if at == before then return count, code, sentence(said, code) end
    each(row_of_end(at, code, said, limit))
    if code == 124 then return count, code, without end
  end
end

-- Ops or layers, as a table.
local function walk_all(title, options, seconds)
  local rows, name, bits, total = {}, nil, nil, 0
  local function flush()
    if name then report_rows(name, rows) end
    rows, name = {}, nil
  end
  print("\n%-20s %5s  %8s %8s %8s", title, "cases", table.unpack(DTYPES))
  if small then options.small = true end
  local words = on(opt.device, "gpu_check_ops.lua")
  local count, code, why = walk(words, options, seconds, function(row)
    if row.name ~= name then flush() end
    name, rows[row.dtype] = row.name, row
    total = total + row.cases
    bits = bits or row.other_bits and ("%s %s, %s"):format(row.name, row.dtype, row.other_bits)
    result[title] = result[title] or {}
    table.insert(result[title], row)
  end)
  flush()
  print ""
  if why then report(title, "FAIL", "%s", why) end
  report(title .. ": the same bits twice", (bits or count == 0 or code ~= 0) and "FAIL" or "good",
         "%s", bits or ("%d cases"):format(total))
end

-- What the peer gives for all cases, as files for gpu_check_ops.lua; nil without it.
local function ask_peer()
  if opt.peer == "" then return nil end
  local prefix = opt.out .. "/peer-"
  local code, _, said = run({opt.peer, folder .. "/../tests/oracle/make.py", "check", prefix,
                             table.unpack(DTYPES)}, nil, 120)
  if code == 0 then return prefix end
  report("PyTorch", "FAIL", "%s", sentence(said, code))
end

function parts.ops()
  local prefix = ask_peer()
  print("\nworst errors, 1 is what is allowed; the truth is of %s",
        prefix and "PyTorch in f64" or "the CPU in f64")
  walk_all("op", {peer = prefix}, 200)
end

function parts.layers()
  print "\nlayers of resnet50, mobilenet_v1 and vgg16; the truth is of the CPU in f32"
  walk_all("layer", small and {layers = true, images = 1, channels = 16, side = 14}
                    or {layers = true}, 120)
end

-- ==== Trainings ==================================================================================

local NETS = {{"lenet", "conv1.w"}, {"resnet20", "conv1.w"}, {"depthwise", "1.w"}}

-- What a run has written: its losses, how many steps were skipped, and the digest of its weights.
local function read_run(out)
  local run = {losses = {}}
  for line in io.lines(out .. "/metrics.jsonl") do
    local event = json.read(line)
    if event.event == "step" then run.losses[event.step] = event.loss end
    run.skipped = event.skipped or run.skipped
    run.sha = event.weights_sha256 or run.sha
  end
  return run
end

local trainings = 0

-- Trains a net. words: of luatrain, before the script. nil and why if that fails.
local function train(words, arch, steps, fault)
  trainings = trainings + 1
  local out = ("%s/run-%d"):format(opt.out, trainings)
  local command = {"env", "LUATRAIN_FAULT=" .. (fault or ""), program}
  for _, word in ipairs(words) do command[#command + 1] = word end
  for _, word in ipairs{"--out", out, "--resume", "never", "--quiet",
                        folder .. "/gpu_check_train.lua"} do command[#command + 1] = word end
  local code, _, said = run(command, {arch = arch, steps = steps}, 60)
  local why = code ~= 0 and sentence(said, code) or without_libraries(said)
  if why then return nil, why, code end
  return read_run(out)
end

-- By how much losses differ at most, as a part of the others.
local function apart(a, b)
  local most = #a.losses == #b.losses and 0.0 or 1 / 0
  for i, loss in ipairs(a.losses) do
    local by = math.abs(loss - (b.losses[i] or 0 / 0)) / math.abs(b.losses[i] or 0 / 0)
    if not (by <= most) then most = by end
  end
  return most
end

local function compare_training(arch, amp, steps, fault, allowed)
  local what = ("%s, %s%s"):format(arch, amp == "off" and "f32" or amp, fault and ", an inf" or "")
  local words = {"--device", opt.device, "--amp", amp}
  local first, why = train(words, arch, steps, fault)
  local again = first and train(words, arch, steps, fault)
  local cpu, cpu_why = train({"--device", "cpu", "--amp", amp}, arch, steps, fault)
  if not first or not cpu then return report(what, "FAIL", "%s", why or cpu_why) end
  local by, skipped = apart(first, cpu), fault and 1 or first.skipped or 0
  local same = again and again.sha == first.sha and apart(again, first) == 0
  local right = by <= allowed and same and (not fault or first.skipped == 1)
                and (first.skipped or 0) == (cpu.skipped or 0)
  report(what, right and "good" or "FAIL",
         "losses apart by %.2g (%.2g), skipped %d of %d, on the CPU %d; twice: %s", by, allowed,
         first.skipped or 0, #first.losses, cpu.skipped or 0,
         same and "the same bits" or "OTHER BITS")
  return skipped
end

-- Curves on the device beside the CPU's.
function parts.losses()
  local steps = small and 6 or 20
  print("\ntrainings of %d steps on %s and on the CPU", steps, opt.device)
  for i = 1, small and 1 or #NETS do
    local arch, param = table.unpack(NETS[i])
    local fault = ("inf:rank=0:step=%d:param=%s"):format(steps // 2, param)
    compare_training(arch, "off", steps, nil, 3e-3)
    compare_training(arch, "fp16", steps, nil, 2e-2)
    compare_training(arch, "fp16", steps, fault, 2e-2)
  end
end

-- Two ranks beside one. There may be no plugin for MPI.
local function compare_ranks(what, words, steps, one)
  local many, why, code = train(words, "lenet", steps)
  if many then
    local by = apart(many, one)
    return report(what, by <= 3e-3 and "good" or "FAIL", "losses apart by %.2g (0.003)", by)
  end
  report(what, code == 3 and "-" or "FAIL", "%s", why)
end

function parts.ranks()
  local steps = small and 6 or 20
  local device = opt.device == "cuda" and "cuda:0" or opt.device       -- of several one for all
  print("\nranks that share %s, beside one", device)
  local one, why = train({"--device", device}, "lenet", steps)
  if not one then return report("one rank", "FAIL", "%s", why) end
  local host = {"--device", device, "--sums", "host", "--check-sync", "2"}
  compare_ranks("two threads", {"--ranks", "2", table.unpack(host)}, steps, one)
  compare_ranks("two processes", {"launch", "-n", "2", table.unpack(host)}, steps, one)
  local _, version = run({program, "--device", opt.device, "--version"}, nil, 30)
  if not version:find "NCCL" then
    return report("NCCL, one process", "-", "not in this build: --version names no NCCL")
  end
  local nccl = {"--device", opt.device, "--sums", "nccl", "--check-sync", "2"}
  compare_ranks("NCCL, one process", {"launch", "-n", "1", table.unpack(nccl)}, steps, one)
  compare_ranks("NCCL, two threads", {"--ranks", "2", table.unpack(nccl)}, steps, one)
end

-- ==== compute-sanitizer ==========================================================================

local function find_sanitizer()
  local home = os.getenv "CUDA_HOME" or "/usr/local/cuda"
  local pipe <close> = io.popen(("PATH=$PATH:%s/bin command -v compute-sanitizer")
                                :format(processes.quote(home)))
  return pipe:read "l"
end

-- A call of CUDA's that fails is nothing to memcheck here: NVIDIA's libraries try what there is by
-- such calls, and ours are errors of the process.
local OF_TOOL = {memcheck = {"--report-api-errors", "no"}, racecheck = {}}

-- What names of kernels of NVIDIA's libraries have in them. Whatever those are called with, a race
-- in their shared memory is none of ours; and racecheck is known to suspect some that are right.
local NVIDIAS = {"cublas", "cudnn", "cutlass", "gemm", "gemv", "nccl", "nvjet", "xmma"}
for _, name in ipairs(NVIDIAS) do
  table.insert(OF_TOOL.racecheck, "--kernel-name-exclude")
  table.insert(OF_TOOL.racecheck, "kns=" .. name)
end

-- The files whose names begin like that, the oldest first: each process of a walk has its own.
local function files_of(prefix)
  local pipe <close> = io.popen("ls -tr " .. processes.quote(prefix) .. "*.txt 2>/dev/null")
  local files = {}
  for path in pipe:lines() do files[#files + 1] = path end
  return files
end

-- The first thing that a tool has found, as its files say, and in which; nil if it is nothing. All
-- that they have beside it is the banner, and, of a process that has come to its end, the summary.
local function finding(files)
  for _, path in ipairs(files) do
    for line in io.lines(path) do
      local text = line:match "^=========%s*(.*)"
      if text and text ~= "COMPUTE-SANITIZER" and not text:find " SUMMARY: 0 " then
        return text, path
      end
    end
  end
end

local function sanitize(sanitizer, tool, seconds)
  local prefix = ("%s/%s-"):format(opt.out, tool)
  os.execute("rm -f " .. processes.quote(prefix) .. "*.txt")
  local words = {sanitizer, "--tool", tool, "--error-exitcode", "99",
                 "--log-file", prefix .. "%p.txt"} -- it puts its own process id there
  for _, word in ipairs(OF_TOOL[tool]) do words[#words + 1] = word end
  for _, word in ipairs(on(opt.device, "gpu_check_ops.lua")) do words[#words + 1] = word end
  local wrong, late
  local count, code, why = walk(words, {small = true, dtypes = "f32,f16"}, seconds, function(row)
    if row.late then late = row.error else wrong = wrong or row.error end
  end)
  local files = files_of(prefix)
  local found, path = finding(files)
  local idle = found and found:find "before first instrumented API call" ~= nil
  if idle and opt.device == "cpu" then
    return report(tool, "-", "the CPU makes no call that it could watch")
  end
  why = why or wrong
  if code == 124 then                 -- what it has found is in its files, and in no exit code
    why = why or #files == 0 and "it has written no log" or count == 0 and late or nil
  end
  if code == 0 and not why and not idle then
    report(tool, "good", "%d ops and dtypes", count)
  elseif code == 124 and not why and not found then
    report(tool, "good", "nothing found in %d ops and dtypes, then the time was over", count)
  else
    local what = {why or found or "exit " .. code, why and found}
    report(tool, "FAIL", "%s: see %s", table.concat(what, "; "), path or log)
  end
end

function parts.sanitizer()
  print "\ncompute-sanitizer, small cases"
  local sanitizer = find_sanitizer()
  for _, tool in ipairs{"memcheck", "racecheck"} do
    if sanitizer then
      sanitize(sanitizer, tool, 75)
    else
      report(tool, "-", "compute-sanitizer is not installed")
    end
  end
end

-- ==== All of it ==================================================================================

local names = {}
for name in opt.parts:gmatch "[^,]+" do
  if not parts[name] then refuse("--parts: there is no '%s'", name) end
  names[#names + 1] = name
end
if #names == 0 then refuse "--parts wants one at least" end
if opt.out == "" then refuse "--out wants a folder" end
os.execute("mkdir -p " .. processes.quote(opt.out) .. " 2>/dev/null")
local file, why = io.open(log, "w")
if not file then refuse("--out: cannot write %s", why) end
file:close()
local code, version, said = run({program, "--device", opt.device, "--version"}, nil, 60)
if code ~= 0 then
  io.stderr:write("tools/gpu_check: ", sentence(said, code), "\n")
  os.exit(code, true)
end
print("%s", version:gsub("\n$", ""))
deadline = bench.clock() + opt.seconds
for _, name in ipairs(names) do
  if bench.clock() < deadline then
    parts[name]()
  else
    report(name, "FAIL", "there was no time left for it")
  end
end
result.version, result.good = version, good
bench.write(opt.out .. "/gpu_check.json", result)
print("\n%s after %.0f s; all of it is in %s", good and "good" or "FAIL",
      opt.seconds - (deadline - bench.clock()), opt.out)
os.exit(good, true)
