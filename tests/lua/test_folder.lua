-- test_folder.lua - a run whose folder is removed, renamed or replaced, and folders, FIFOs, devices
-- and garbage under the names of its files.
local lt = require "luatrain"
local checkpoint = require "luatrain.train.checkpoint"
local T = require "lt_test"

-- 12 steps. In step `at`, rank 0 runs a shell command; $L is the luatrain program.
local SCRIPT = [[
local lt = require "luatrain"
local opt = lt.args{at = 0, cmd = "", epochs = 2}
local train, test = lt.data.open "synthetic:6x6x1/3/48"
local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{36, 3}}
local n = 0
lt.fit{net = net, train = train, test = test, epochs = opt.epochs, batch = 8,
       optim = lt.optim.sgd(net, {lr = 0.01}),
       loss = function(z, y)
         n = n + 1
         if n == opt.at and lt.rank() == 0 then os.execute(opt.cmd) end
         return lt.cross_entropy(z, y)
       end}
]]

local function new_folder() return T.folder(SCRIPT) end

-- Runs t.lua in a folder, for at most 30 seconds. Returns its output and exit code.
local function run(at, options, arguments)
  return T.run(at, ("--threads 1 --quiet --out out %s t.lua %s"):format(options, arguments or ""),
               "timeout -k 1 30")
end

-- The same, and checks the exit code and that the output contains a text. Returns the output.
local function ends(at, options, arguments, code, message)
  return T.ends(at, ("--threads 1 --quiet --out out %s t.lua %s"):format(options, arguments), code,
                message, "timeout -k 1 30")
end

-- The names in a folder, and a digest of its weights, which shows which run wrote them.
local function contents(path)
  local pipe = assert(io.popen(("export LC_ALL=C; cd %s && ls -A && cat $(find . -name 'step-*' "
                                .. "-o -name 'w*' | sort) | sha256sum"):format(path)))
  local text = pipe:read "a"
  pipe:close()
  return text
end

-- ==== A lost folder ==============================================================================

local LEAVES = "The run stops after step %d and writes nothing more there; give each run a folder "
               .. "of its own with --out, and leave it in place until the run ends"
local GONE = "out: the folder was removed or renamed while the run used it, or its .lock was. "
             .. LEAVES
local TAKEN = "out: the folder was replaced while the run used it. " .. LEAVES

-- A run that calls the shell command in step 5 stops after that step with exit code 3.
local function stops(at, options, cmd, wanted)
  local text, code = run(at, options, ("--at 5 --cmd '%s'"):format(cmd))
  T.equal({code, (text:gsub("^luatrain: t.lua:%d+: ", ""))}, {3, wanted:format(5) .. "\n"})
end

T.test("a run whose folder is removed or renamed stops and makes no new one", function()
  local at = new_folder()
  stops(at, "", "rm -rf out", GONE)
  assert(not io.open(at .. "/out"))
  stops(at, "", "mv out old", GONE)
  assert(not io.open(at .. "/out"))
  ends(at, "--save-every 2 ", "--at 5 --cmd 'rm out/.lock'", 3, "or its .lock was")
  T.equal(T.names(at .. "/out"),
          "metrics.jsonl step-00000002.safetensors step-00000004.safetensors")
end)

T.test("a run whose folder is replaced leaves the new one alone", function()
  local at = new_folder()
  stops(at, "", "rm -rf out; mkdir out other; touch out/step-00000001.safetensors", GONE)
  T.equal(T.names(at .. "/out"), "step-00000001.safetensors")
  stops(at, "--resume never", "mv out old; ln -s other out; touch out/.lock", TAKEN)
  T.equal(T.names(at .. "/other"), ".lock")
end)

T.test("two runs after rm -rf: the first stops, the second keeps its files", function()
  local at = new_folder()
  local second = "rm -rf out; $L --threads 1 --quiet --out out --max-steps 7 t.lua; "
                 .. "LC_ALL=C ls -A out >names; cp -r out copy"
  local text = ends(at, "--save-every 1 --max-steps 9", ("--at 5 --cmd '%s'"):format(second), 3, "")
  local pid = text:match "out: the folder was replaced while the run used it, and process (%d+) "
  assert(pid, text)
  assert(text:find(("and process %s has begun a run there. "):format(pid)
                   .. LEAVES:format(5) .. "\n", 1, true), text)
  T.equal(contents(at .. "/out"), contents(at .. "/copy"))
  T.equal({run(at, "")}, {"", 0})                      -- the second run can be resumed
end)

T.test("all ranks stop when rank 0 has lost the folder", function()
  local at = new_folder()
  ends(at, "--ranks 2", "--at 5 --cmd 'rm -rf out'", 3, GONE:format(5))
  assert(not io.open(at .. "/out"))
end)

T.test("a run keeps a folder that was moved and replaced by a link to it", function()
  local at = new_folder()
  T.equal({run(at, "", "--at 5 --cmd 'mv out elsewhere; ln -s elsewhere out'")}, {"", 0})
  T.equal(T.names(at .. "/elsewhere"), ".lock curves.svg metrics.jsonl step-00000006.safetensors "
                                     .. "step-00000012.safetensors weights.safetensors")
end)

-- Trains in this process and runs a shell command right before or right after it writes the
-- checkpoint of step 6. Returns the error of the run, and the folder that contains `out`.
local function swap(cmd, before)
  local at, save = T.folder(), checkpoint.save
  local out = at .. "/out"
  local train, test = lt.data.open "synthetic:6x6x1/3/48"
  local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{36, 3}}
  local function act() os.execute(("cd %s; %s"):format(at, cmd)) end
  function checkpoint.save(...)
    local is_step_6 = (select(1, ...)):find "step%-00000006" ~= nil
    if is_step_6 and before then act() end
    local result = save(...)
    if is_step_6 and not before then act() end
    return result
  end
  local ok, err = pcall(lt.fit, {net = net, train = train, test = test, epochs = 2, batch = 8,
                                 save_every = 2, out = out,
                                 optim = lt.optim.sgd(net, {lr = 0.01})})
  checkpoint.save = save
  return not ok and err, at
end

T.test("a save neither removes files from a replaced folder nor writes any to it", function()
  local replace = "rm -rf out; mkdir out; touch out/.lock; "
                  .. "for i in 2 4; do echo theirs >out/step-0000000$i.safetensors; done"
  for _, before in ipairs{true, false} do
    local err, at = swap(replace, before)
    assert(err and err:find("out: the folder was replaced while the run used it. "
                            .. LEAVES:format(6), 1, true), err)
    T.equal(T.names(at .. "/out"), ".lock step-00000002.safetensors step-00000004.safetensors")
    T.equal(T.read(at .. "/out/step-00000002.safetensors"), "theirs\n")
    err, at = swap("rm -rf out", before)
    assert(err and err:find("out: the folder was removed or renamed", 1, true), err)
    assert(not io.open(at .. "/out"))
  end
end)

T.test("a run that is left early after its folder was removed reports it", function()
  local out = T.folder() .. "/out"
  local train = lt.data.open "synthetic:6x6x1/3/48"
  local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{36, 3}}
  local sgd = lt.optim.sgd(net, {lr = 0.01})
  T.raises("out: the folder was removed or renamed", function()
    local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = 8,
                               save_every = 1, out = out}
    for _ in run:epochs() do
      for x, y in run:batches() do
        run:step(T.learn(net, sgd), x, y)
        os.execute("rm -rf " .. out)
        break
      end
      break
    end
  end)
end)

T.test("a run removes only checkpoints that it wrote or resumed from", function()
  local at = new_folder()
  run(at, "--save-every 1 --max-steps 4")
  os.execute(("cd %s/out; mkdir step-00000001.safetensors; echo x >step-00000002.safetensors")
             :format(at))
  ends(at, "--save-every 1", "--at 3 --cmd 'echo x >out/step-00000003.safetensors'", 0, "")
  T.equal(T.names(at .. "/out"),
          ".lock curves.svg metrics.jsonl step-00000001.safetensors step-00000002.safetensors "
          .. "step-00000003.safetensors step-00000011.safetensors step-00000012.safetensors "
          .. "weights.safetensors")
end)

-- ==== Other kinds of files under the names of a run ==============================================

local MAKES = {folder = "mkdir %s", fifo = "mkfifo %s", full = "ln -s /dev/full %s",
               zero = "ln -s /dev/zero %s"}

-- Trains with another kind of file under a name in `out`, from step 5 on if `late`. Returns the
-- output and the exit code.
local function taken(name, kind, options, late)
  local at = new_folder()
  local make = MAKES[kind]:format("out/" .. name)
  os.execute(("cd %s; mkdir out; %s"):format(at, late and "" or make))
  local text, code = run(at, options or "", late and ("--at 5 --cmd '%s'"):format(make))
  return text:gsub("^luatrain: t.lua:%d+: ", ""), code
end

T.test("a run file that is not a regular file is an error or a warning", function()
  for kind in pairs(MAKES) do
    local is = kind == "folder" and "Is a directory" or "this is not a regular file"
    local text, code = taken("metrics.jsonl", kind)
    T.equal({code, text}, {3, ("cannot read out/metrics.jsonl: %s\n"):format(is)})
    text, code = taken(".lock", kind)
    T.equal({code, text}, {3, ("out/.lock: cannot write to it: %s\n"):format(is)})
    text, code = taken("weights.safetensors", kind, "", true)
    T.equal({code, text}, {5, "the weights were not saved: out/weights.safetensors: this is not a "
                              .. "regular file; it is not replaced. Resume from the checkpoint of "
                              .. "step 12 with the same command and --out out\n"})
    text, code = taken("curves.svg", kind, "", true)
    T.equal({code, text}, {0, "luatrain: warning: no curves: out/curves.svg: this is not a "
                              .. "regular file; it is not replaced\n"})
    text, code = taken("step-00000012.safetensors", kind, "--resume auto")
    is = kind == "folder" and "this is a folder" or "this is not a regular file"
    T.equal({code, text}, {5, "out: no checkpoint can be read, and --resume never starts over:\n"
                              .. "  out/step-00000012.safetensors: " .. is .. "\n"})
  end
end)

-- ==== The folder of another run or program =======================================================

T.test("a folder with files that no run wrote is refused, and stays as it is", function()
  for name, text in pairs{["weights.safetensors"] = "mine", ["curves.svg"] = "mine",
                          ["metrics.jsonl"] = '{"loss": 3}\n'} do
    for _, options in ipairs{"", "--ranks 2", "--resume never"} do
      local at = new_folder()
      os.execute("mkdir " .. at .. "/out")
      T.write(at .. "/out/" .. name, text)
      local said, code = run(at, options)
      T.equal({code, said}, {3, "luatrain: t.lua:6: out has files that no run of luatrain wrote, "
                                .. "and this run would overwrite them; name another folder with "
                                .. "--out\n"})
      T.equal(T.read(at .. "/out/" .. name), text)
    end
  end
end)

T.test("a folder with another script's run is refused", function()
  local at = new_folder()
  os.execute(("cp %s/t.lua '%s/my \"u\".lua'"):format(at, at))
  T.equal({run(at, "", "--epochs 1")}, {"", 0})
  local before = contents(at .. "/out")
  local said, code = T.run(at, "--threads 1 --quiet --out out 'my \"u\".lua'")
  T.equal({code, said}, {3, 'luatrain: my "u".lua:6: out has a run of the script "t", but this '
                            .. 'script is "my \\"u\\""; name another folder with --out '
                            .. '(--resume CHECKPOINT continues that run there), or replace the '
                            .. 'run with --resume never\n'})
  T.equal(contents(at .. "/out"), before)
  said, code = T.run(at, "--threads 1 --quiet --out out --resume never 'my \"u\".lua' --epochs 1")
  T.equal({code, said}, {0, ""})
  local rest = "--threads 1 --quiet --out out 'my \"u\".lua' --epochs 2"
  T.equal(select(2, T.run(at, rest)), 0)
  os.execute(("rm %s/out/metrics.jsonl"):format(at))     -- its checkpoints remain
  T.equal(select(2, run(at, "", "--epochs 3")), 0)
  T.write(at .. "/out/metrics.jsonl", '{"event":"start"')            -- torn
  T.equal(select(2, run(at, "", "--epochs 4")), 0)
end)

T.test("without a checkpoint, a run that cannot save does not say that there is one", function()
  local at = new_folder()
  local cmd = "mkdir out/step-00000005.safetensors"
  local said, code = run(at, "--max-steps 5", ("--at 5 --cmd '%s'"):format(cmd))
  T.equal({code, (said:gsub("out/step.-%. ", "REASON. "))},
          {5, "luatrain: warning: 1 checkpoint could not be saved\n"
              .. "luatrain: t.lua:6: stopped by --max-steps at step 5, but not saved: REASON. "
              .. "There is no checkpoint to resume from; name another --out\n"})
end)

T.test("a FIFO under the name of a rank's log does not block", function()
  local text, code = taken("rank-1.log", "fifo", "--ranks 2")
  T.equal({code, text}, {0, ""})
end)

T.test("a FIFO that replaces metrics.jsonl blocks neither the run nor a report", function()
  local at = new_folder()
  local text, code = run(at, "", "--at 9 --cmd 'cd out; rm metrics.jsonl; mkfifo metrics.jsonl'")
  T.equal({code, text}, {0, "luatrain: warning: no curves: cannot read out/metrics.jsonl: this is "
                            .. "not a regular file\n"})
  text, code = T.run(at, "report --target 0.5 out")
  T.equal({code, text}, {2, "luatrain: report: cannot read out/metrics.jsonl: this is not a "
                            .. "regular file\n"})
end)

T.test("--resume with a file that is not a checkpoint", function()
  local at = new_folder()
  os.execute(("cd %s; mkfifo fifo; ln -s nowhere link; mkdir empty; ln -s loop loop"):format(at))
  for from, why in pairs{fifo = "this is not a regular file", link = "cannot open: No such file or "
                         .. "directory", ["/dev/zero"] = "this is not a regular file",
                         loop = "cannot open: Too many levels of symbolic links"} do
    local text, code = run(at, "--resume " .. from)
    T.equal({code, text:match ": (.*)"}, {5, ("t.lua:6: %s: %s\n"):format(from, why)})
  end
  local text, code = run(at, "--resume empty")
  T.equal({code, text:match ": (.*)"},
          {5, "t.lua:6: --resume empty: it has no checkpoint\n"})
end)

T.test("garbage under the names of checkpoints is reported, not used and not removed", function()
  local at = new_folder()
  run(at, "--max-steps 3")
  os.execute(([[cd %s/out
    head -c 3000 /dev/urandom >step-00000005.safetensors
    mkfifo step-00000006.safetensors
    mkdir step-00000007.safetensors
    ln -s nowhere step-00000008.safetensors
    ln -s /dev/zero step-00000009.safetensors
    : >step-99999999999999999999.safetensors
    : >step-x.safetensors
    ln -s . step-00000010.safetensors]]):format(at))
  local before = T.names(at .. "/out")
  local text = ends(at, "--max-steps 5", "", 0, "")
  local _, n = text:gsub("; resuming from out/step%-00000003.safetensors\n", "")
  T.equal(n, 7)
  T.equal(T.names(at .. "/out"), before)                 -- step 5 replaced the file of that name
  T.equal({run(at, "--resume never")}, {"", 0})
  T.equal(T.names(at .. "/out"),
          ".lock curves.svg metrics.jsonl step-00000006.safetensors step-00000012.safetensors "
          .. "step-x.safetensors weights.safetensors")
end)

T.finish()
