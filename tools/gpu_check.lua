-- gpu_check.lua - checks that a device computes the same results as the CPU. Prints a table and
-- takes at most ten minutes. tools/gpu_check runs it.
--
-- All parts run in separate processes, which may crash; this process never uses the device. Each
-- result is also appended to gpu_check.jsonl at once. --device cpu tests the check itself, with
-- small sizes.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"
local measure = require "measure"

local opt = lt.args{
  device = "cuda", out = "gpu_check.out", peer = os.getenv "PEER" or "", seconds = 600.0,
  small = false, parts = "properties,ops,layers,losses,ranks,sanitizer",
  help = {
    device = "device to check; cpu: a dry run", out = "folder for all results",
    peer = "a Python that has PyTorch, to compare ops with (the variable PEER)",
    seconds = "time limit of the whole check", small = "use small sizes, as for the CPU",
    parts = "parts of the check to run",
  }}

local folder, program, print = measure.folder, measure.program(), measure.print
local small = opt.small or opt.device == "cpu"
local deadline = math.huge -- of the part, set once the device is known to exist
local log = opt.out .. "/log.txt"
local good, unchecked = true, 0
local is_late = false      -- whether the time limit ended the part

local function record(row)
  local file <close> = assert(io.open(opt.out .. "/gpu_check.jsonl", "a"))
  file:write(json.text(row), "\n")
end

-- ==== Processes ==================================================================================

local errors = opt.out .. "/errors.txt"   -- stderr of the last command
local LATE = -1            -- instead of an exit code: the time limit of the part ended the process

-- Returns a shell command that runs words for at most `seconds` and not beyond the deadline, its
-- time limit, and when that ends. The command writes its stderr to the file `errors`. options: as
-- in measure.command(). timeout kills the whole process group: a process that ignores SIGTERM
-- would keep the pipe open.
local function limited(words, options, seconds)
  seconds = math.max(math.min(seconds, deadline - bench.clock()), 1) // 1 | 0
  return ("timeout -s KILL %d %s 2>%s"):format(seconds, measure.command(words, options),
                                            measure.quote(errors)), seconds,
         bench.clock() + seconds
end

-- Closes the pipe of a command and logs the command. Returns its exit code, 124 if it timed out,
-- and its stderr. limit: when its time ends.
local function ended(pipe, words, limit)
  local _, how, code = pipe:close()
  if how == "signal" then code = 128 + code end
  if code == 137 and bench.clock() >= limit then code = 124 end
  local file <close> = io.open(errors, "r")
  local said = file and file:read "a" or ""
  os.remove(errors)
  local to <close> = io.open(log, "a")
  to:write(table.concat(words, " "), "\n", said, "exit ", code or 0, "\n\n")
  return code or 0, said
end

-- Runs a command. Returns its exit code or LATE, its stdout and its stderr.
local function run(words, options, seconds)
  if bench.clock() > deadline then return LATE, "", "no time was left for it" end
  local command, limit, ends = limited(words, options, seconds)
  local pipe = assert(io.popen(command, "r"))
  local text = pipe:read "a"
  local code, said = ended(pipe, words, ends)
  if code ~= 124 then return code, text, said end
  return limit < seconds and LATE or code, text, ("it took more than %d s"):format(limit)
end

-- The last line of a process's stderr that begins with "luatrain". If there is none, its last line.
local function sentence(said, code)
  local last
  for line in said:gmatch "[^\n]+" do
    if line:find "^luatrain" or not (last and last:find "^luatrain") then last = line end
  end
  return last or "exit " .. code
end

-- luatrain's messages that its own kernels replace NVIDIA's libraries, or nil if the libraries are
-- in use. The results are correct without them, but then the libraries are not checked.
local function without_libraries(said)
  local list = {}
  for _, work in ipairs{"convolutions", "matrix products"} do
    list[#list + 1] = said:match("%S+ computes " .. work .. " without [^\n]+")
  end
  return list[1] and table.concat(list, "; ")
end

-- The command that checks ops, after these words.
local function ops_command(...)
  local words = {...}
  table.move({program:match "^(.*)/" .. "/check_ops", folder .. "/..", "--device=" .. opt.device},
             1, 3, #words + 1, words)
  return words
end

-- ==== The table ==================================================================================

local function count_verdict(verdict)
  good = good and verdict ~= "FAIL"
  unchecked = unchecked + (verdict == "-" and 1 or 0)
end

-- Reports one line. what: the subject; verdict: "good", "FAIL", or "-" if it was not checked; then
-- an optional format with details.
local function report(what, verdict, ...)
  local text = select("#", ...) > 0 and string.format(...) or ""
  print("%-38s %-5s %s", what, verdict, text)
  count_verdict(verdict)
  record{what = what, verdict = verdict, text = text}
end

-- The verdict for a process that failed.
local function failure(code)
  is_late = is_late or code == LATE
  return code == LATE and "-" or "FAIL"
end

local DTYPES = {"f32", "f16", "bf16"}

local function is_right(row)
  return not row.error and row.worst and row.worst <= 1
end

local function cell(row)
  if not row then return "" end
  if row.late then return "-" end
  if row.error then return "FAIL" end
  return row.worst and ("%.2f"):format(row.worst) or "nan"
end

-- Reports one line for an op or layer in all dtypes. rows: by dtype.
local function report_rows(name, rows)
  local texts, verdict, why, count = {}, "good", "", 0
  for i, dtype in ipairs(DTYPES) do
    local row = rows[dtype]
    texts[i] = cell(row)
    count = math.max(count, row and row.cases or 0)
    if row and not is_right(row) and verdict ~= "FAIL" then
      verdict = row.late and "-" or "FAIL"
      why = ("  %s: %s"):format(dtype, row.error or row.where)
    end
  end
  print("%-20s %5d  %8s %8s %8s  %s%s", name, count, texts[1], texts[2], texts[3], verdict, why)
  count_verdict(verdict)
end

-- ==== The parts ==================================================================================

local parts = {}

-- Saves cuDNN's properties of the device, with which tests/cuda makes plans on other machines. An
-- error is a failure unless a library is not installed.
function parts.properties()
  local what = "properties of the device"
  if opt.device == "cpu" then return report(what, "-", "the CPU has none") end
  local tool = program:match "^(.*)/" .. "/tests/cuda/properties"
  local code, text, said = run({tool, opt.device:match ":(%d+)$" or "0"}, nil, 60)
  local ok, found = pcall(json.read, text)
  if code ~= 0 or not ok then
    local missing = said:find "lib%S+ was not found"
    return report(what, missing and "-" or failure(code), "%s", sentence(said, code))
  end
  local name = tostring(found.deviceName):lower():gsub("[^%w]+", "_")
  local file <close> = assert(io.open(("%s/%s.json"):format(opt.out, name), "w"))
  file:write(text)
  report(what, "good", "%s/%s.json, for tests/cuda", opt.out, name)
end

-- The row for the op and dtype at which a walk ended early, with its error. began: when.
local function row_of_end(at, code, said, began)
  local name, dtype = at:match "^(%S+) (%S+)$"
  local row = {name = name, dtype = dtype, cases = 0, late = code == 124}
  row.error = row.late and ("the time ended after %.0f s in it"):format(bench.clock() - began)
              or sentence(said, code)
  return row
end

-- Runs check_ops to its end. If it crashes, restarts it after the op in which it crashed.
-- Calls each(row) for each result. Returns the number of rows, the last exit code, and another
-- problem or nil.
local function walk(words, options, seconds, each)
  local until_then, count, at, began, without = bench.clock() + seconds, 0, "", nil, nil
  while true do
    options.after = at ~= "" and at or nil
    local before, done = at, false
    local command, _, ends = limited(words, options, until_then - bench.clock())
    local pipe = assert(io.popen(command, "r"))
    for line in pipe:lines() do
      local ok, row = pcall(json.read, line)
      if ok and type(row) == "table" then
        if row.begin then at, began = row.begin, bench.clock() end
        done = done or row.done
        if row.name then
          each(row)
          count = count + 1
        end
      end
    end
    local code, said = ended(pipe, words, ends)
    without = without or without_libraries(said)
    if done then return count, code, without end
    if at == before then return count, code, sentence(said, code) end
    each(row_of_end(at, code, said, began))
    if code == 124 then return count, code, without end
  end
end

-- Checks all ops or all layers, and prints the table.
local function walk_all(title, options)
  local rows, name, bits, total = {}, nil, nil, 0
  local function flush()
    if name then report_rows(name, rows) end
    rows, name = {}, nil
  end
  print("\n%-20s %5s  %8s %8s %8s", title, "cases", table.unpack(DTYPES))
  options.small = small
  local count, code, why = walk(ops_command(), options, deadline - bench.clock(), function(row)
    if row.name ~= name then flush() end
    name, rows[row.dtype] = row.name, row
    total = total + row.cases
    bits = bits or row.other_bits and ("%s %s, %s"):format(row.name, row.dtype, row.other_bits)
    record{part = title, row = row}
  end)
  flush()
  print ""
  if code == 124 then code = LATE end
  if why then report(title, "FAIL", "%s", why) end
  local verdict = code ~= 0 and failure(code) or count == 0 and "FAIL" or "good"
  report(title .. ": the same bits twice", bits and "FAIL" or verdict, "%s",
         bits or ("%d cases%s"):format(total, code == LATE and " until the time limit" or ""))
end

-- Writes the peer's results for all cases to files, for check_ops. Returns the prefix of
-- their paths, or nil without a peer.
local function query_peer()
  if opt.peer == "" then return nil end
  local prefix = opt.out .. "/peer-"
  local code, _, said = run({opt.peer, folder .. "/../tests/oracle/make.py", "check", prefix,
                             table.unpack(DTYPES)}, nil, 120)
  if code == 0 then return prefix end
  report("PyTorch", failure(code), "%s", sentence(said, code))
end

function parts.ops()
  local prefix = query_peer()
  print("\nworst errors relative to the tolerance; the expected values are from %s",
        prefix and "PyTorch in f64" or "the CPU in f64")
  walk_all("op", {peer = prefix})
end

function parts.layers()
  print "\nlayers of resnet50, mobilenet_v1 and vgg16; the expected values are from the CPU in f32"
  walk_all("layer", {layers = true})
end

-- ==== Training ===================================================================================

local NETS = {{"lenet", "conv1.w"}, {"resnet20", "conv1.w"}, {"depthwise", "1.w"}}

-- Reads the files of a run: returns its losses, number of skipped steps, and digest of weights.
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

-- Trains a net. words: luatrain's options before the script. Returns the result of read_run(), or
-- nil, a reason and the exit code or LATE. Keeps the run's folder only if it fails.
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
  local found = read_run(out)
  os.execute("rm -r " .. measure.quote(out))
  return found
end

-- The largest relative difference of the losses of run a from those of run b.
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
  local runs = {}
  for i, device in ipairs{opt.device, opt.device, "cpu"} do
    local found, why, code = train({"--device", device, "--amp", amp}, arch, steps, fault)
    if not found then return report(what, failure(code), "%s", why) end
    runs[i] = found
  end
  local first, again, cpu = table.unpack(runs)
  record{what = what, losses = first.losses, on_cpu = cpu.losses}
  local by = apart(first, cpu)
  local same = again.sha == first.sha and apart(again, first) == 0
  local right = by <= allowed and same and (not fault or first.skipped == 1)
                and (first.skipped or 0) == (cpu.skipped or 0)
  report(what, right and "good" or "FAIL",
         "losses differ by %.2g (%.2g), skipped %d of %d, on the CPU %d; twice: %s", by, allowed,
         first.skipped or 0, #first.losses, cpu.skipped or 0,
         same and "the same bits" or "DIFFERENT BITS")
end

-- Compares loss curves on the device with those on the CPU.
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

-- Compares a run on several ranks with `one`, on one rank. Exit code 3 means that this machine
-- lacks something, such as the MPI plugin. That is not a failure.
local function compare_ranks(what, words, steps, one)
  local many, why, code = train(words, "lenet", steps)
  if many then
    local by = apart(many, one)
    return report(what, by <= 3e-3 and "good" or "FAIL", "losses differ by %.2g (0.003)", by)
  end
  report(what, code == 3 and "-" or failure(code), "%s", why)
end

function parts.ranks()
  local steps = small and 6 or 20
  local device = opt.device == "cuda" and "cuda:0" or opt.device       -- all ranks share one
  print("\nseveral ranks that share %s, compared with one", device)
  local one, why, code = train({"--device", device}, "lenet", steps)
  if not one then return report("one rank", failure(code), "%s", why) end
  local host = {"--device", device, "--sums", "host", "--check-sync", "2"}
  compare_ranks("two threads", {"--ranks", "2", table.unpack(host)}, steps, one)
  compare_ranks("two processes", {"launch", "-n", "2", table.unpack(host)}, steps, one)
  compare_ranks("a pipeline of two stages", {"--ranks", "2", "--device", device, "--parallel",
                                             "pipe=2,micro=2,cut=fc1"}, steps, one)
  local _, version = run({program, "--device", opt.device, "--version"}, nil, 30)
  if not version:find "NCCL %d" then
    return report("NCCL, one process", "-", "NCCL is not used: --version shows why")
  end
  local nccl = {"--device", opt.device, "--sums", "nccl", "--check-sync", "2"}
  compare_ranks("NCCL, one process", {"launch", "-n", "1", table.unpack(nccl)}, steps, one)
  compare_ranks("NCCL, two processes", {"launch", "-n", "2", table.unpack(nccl)}, steps, one)
end

-- ==== compute-sanitizer ==========================================================================

local function find_sanitizer()
  local home = os.getenv "CUDA_HOME" or "/usr/local/cuda"
  local pipe <close> = io.popen(("PATH=$PATH:%s/bin command -v compute-sanitizer")
                                :format(measure.quote(home)))
  return pipe:read "l"
end

-- memcheck must not report failed CUDA calls: NVIDIA's libraries use them to probe for features,
-- and in our code they make the process fail anyway.
local OF_TOOL = {memcheck = {"--report-api-errors", "no"}, racecheck = {}}

-- Substrings of the names of kernels in NVIDIA's libraries, which racecheck skips. A race in their
-- shared memory cannot be our error, and racecheck is known to report false positives for some.
local NVIDIAS = {"cublas", "cudnn", "cutlass", "gemm", "gemv", "nccl", "nvjet", "xmma"}
for _, name in ipairs(NVIDIAS) do
  table.insert(OF_TOOL.racecheck, "--kernel-name-exclude")
  table.insert(OF_TOOL.racecheck, "kns=" .. name)
end

-- The log files with a prefix, the oldest first. Each process of a walk writes its own.
local function files_of(prefix)
  local pipe <close> = io.popen("ls -tr " .. measure.quote(prefix) .. "*.txt 2>/dev/null")
  local files = {}
  for path in pipe:lines() do files[#files + 1] = path end
  return files
end

-- Returns the first finding in the log files of a tool, and its file; nil if there is none. Besides
-- findings, a log has only the banner and, if the process ended normally, the summary.
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
  local remove = "rm -f " .. measure.quote(prefix) .. "*.txt"
  os.execute(remove)
  local words = ops_command(sanitizer, "--tool", tool, "--error-exitcode", "99", "--log-file",
                            prefix .. "%p.txt", table.unpack(OF_TOOL[tool])) -- %p: the process id
  local wrong
  local count, code, why = walk(words, {small = true, dtypes = 2}, seconds, function(row)
    if not row.late then wrong = wrong or row.error end
  end)
  local files = files_of(prefix)
  local found, path = finding(files)
  if found and found:find "before first instrumented API call" and opt.device == "cpu" then
    return report(tool, "-", "the CPU makes no CUDA calls")
  end
  local is_error = found and found:find "^Error: " ~= nil     -- of the tool, not of a kernel
  if count == 0 and not wrong and (is_error or not found) then
    return report(tool, "-", "no op was finished in %.0f s%s", seconds,
                  (found or why) and ": " .. (found or why) or "")
  end
  why = wrong or why
  local is_over = code == 124         -- findings are in the log files, not in the exit code
  if is_over and #files == 0 then why = why or "it wrote no log" end
  if not (why or found) and (is_over or code == 0) then
    report(tool, "good", "nothing found in %d ops and dtypes%s", count,
           is_over and " until the time limit" or "")
    return os.execute(remove)
  end
  local what = {why or found or "exit " .. code, why and found}
  report(tool, "FAIL", "%s: see %s", table.concat(what, "; "), path or log)
end

function parts.sanitizer()
  print "\ncompute-sanitizer, small cases"
  local sanitizer = find_sanitizer()
  for i, tool in ipairs{"memcheck", "racecheck"} do
    if sanitizer then
      sanitize(sanitizer, tool, (deadline - bench.clock()) / (3 - i))
    else
      report(tool, "-", "compute-sanitizer is not installed")
    end
  end
end

-- ==== Main =======================================================================================

-- Shares of the time that is left, for each part and those after it.
local SHARES = {properties = 3, ops = 8, layers = 5, losses = 5, ranks = 4, sanitizer = 6}

local names = measure.words_of("parts", opt.parts, parts, "part")
if opt.out == "" then measure.refuse "--out requires a folder" end
os.execute("mkdir -p " .. measure.quote(opt.out) .. " 2>/dev/null")
local file, why = io.open(log, "a")
if not file then measure.refuse("--out: cannot write %s", why) end
file:close()
local code, version, said = run({program, "--device", opt.device, "--version"}, nil, 60)
if code ~= 0 then
  measure.fail(code, "%s", sentence(said, code))
end
print("%s", version:gsub("\n$", ""))
record{version = version, device = opt.device}
local began, rest, shares = bench.clock(), {}, 0
for _, name in ipairs(names) do shares = shares + SHARES[name] end
for _, name in ipairs(names) do
  local left = began + opt.seconds - bench.clock()
  deadline = bench.clock() + left * SHARES[name] / shares
  shares, is_late = shares - SHARES[name], false
  if left >= 1 then
    parts[name]()
  else
    report(name, failure(LATE), "no time was left for it")
  end
  if is_late then rest[#rest + 1] = name end
end
if #rest > 0 then
  measure.print_rest({folder .. "/gpu_check"}, {
    device = opt.device, parts = table.concat(rest, ","), out = opt.out, small = small,
    peer = opt.peer ~= "" and opt.peer})
end
local verdict = not good and "FAIL" or #rest > 0 and "incomplete" or "good"
local seconds = bench.clock() - began
record{verdict = verdict, seconds = seconds, unchecked = unchecked, rest = rest}
print("\n%s after %.0f s%s; all results are in %s", verdict, seconds,
      unchecked > 0 and (", %d not checked"):format(unchecked) or "", opt.out)
os.exit(verdict == "good", true)
