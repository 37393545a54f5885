-- test_pipeline_bad.lua - pipelines with damaged files, wrong options and failing profiles end with
-- one clear message.
local T = require "lt_test"
local json = require "luatrain.json"

local folder = T.folder [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{mode = "none", accumulate = 1}
local train, test = lt.data.open "synthetic:8x8x1/4/64"
local batch = 8
local place = ("%d of %d"):format(lt.rank())
if opt.mode == "place" then
  io.stderr:write("here is " .. place .. "\n")
  lt.on_root(function() io.stderr:write("root is " .. place .. "\n") end)
  batch = 4 * select(2, lt.rank())
elseif opt.mode == "no_net" then
  return
end
local parts = {conv1 = nn.conv2d{1, 4, 3, pad = 1}, relu = nn.relu(),
               conv2 = nn.conv2d{4, 4, 3, pad = 1}, pool = nn.global_avg_pool2d(),
               fc1 = nn.linear{4, 4}, fc2 = nn.linear{4, 4}}
parts.again = parts.conv2
if opt.mode ~= "thawed" then parts.fc1:freeze() end
local net = nn.module(parts, function(self, x)
  return self.fc2(self.fc1(self.pool(self.again(self.relu(self.conv1(x))))))
end)
local sgd = lt.optim.sgd(net, {lr = 0.1})
if opt.mode == "dead" then assert(net(lt.ones{1, 8, 8, 1}):sum():item() ~= 0, "net is dead") end
if opt.mode == "late" then
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 1, batch = 8}
  for _ in run:epochs() do
    for x, y in run:batches() do
      run:step(function()
        local z = net(x)
        local loss = lt.cross_entropy(z, y)
        loss:backward()
        sgd:step()
        return net.fc1(z):mean()
      end)
    end
  end
end
lt.fit{net = net, train = train, test = test, optim = sgd, epochs = 2, batch = batch,
       accumulate = opt.accumulate}
]]

local PIPE = "--ranks 2 --parallel pipe=2,cut=conv2"

-- Runs luatrain; words: its arguments. Returns what it prints and its exit code.
local function run(words)
  return T.run(folder, "--quiet --threads 1 --seed 5 " .. words, "timeout 120")
end

-- Checks the exit code and that the whole output is one message. Script errors may occur on any
-- rank first.
local function ends(words, code, message)
  local text, got = run(words)
  if code == 1 then text = text:gsub("^luatrain: rank 1: ", "luatrain: ") end
  T.equal({words, got, text}, {words, code, "luatrain: " .. message .. "\n"})
end

local function passes(words)
  return T.ends(folder, "--quiet --threads 1 --seed 5 " .. words, 0, "", "timeout 120")
end

local function count(text, part) return select(2, text:gsub(part:gsub("%p", "%%%0"), "")) end

local function micro_of(out)
  return json.read(T.read(("%s/%s/plan.json"):format(folder, out))).micro
end

local function sha_of(out) return T.sha(folder .. "/" .. out) end

-- ==== plan.json ==================================================================================

passes(PIPE .. ",micro=3 --max-steps 5 --out first t.lua")

-- Makes the folder `again`, which a run can resume, and runs a shell command in it.
local function prepare(command)
  local form = "cd %s && rm -rf again && cp -r first again && cd again && %s"
  assert(os.execute(form:format(folder, command)))
end

local ADVICE = "; remove the file, and set micro=M in --parallel to the number of micro-batches "
               .. "of that run"
local NO_MICRO = "micro must be an integer from 1 to 1024"

T.test("a plan.json that cannot be read ends the run", function()
  for command, why in pairs{
    [ [[echo '{"micro":0}' >plan.json]] ] = NO_MICRO,
    [ [[echo '{"micro":-7}' >plan.json]] ] = NO_MICRO,
    [ [[echo '{"micro":1025}' >plan.json]] ] = NO_MICRO,
    [ [[echo '{"micro":1e9}' >plan.json]] ] = NO_MICRO,
    [ [[echo '{"micro":3000000000}' >plan.json]] ] = NO_MICRO,
    [ [[echo '{"micro":"3"}' >plan.json]] ] = NO_MICRO,
    [ [[echo '{"stages":2}' >plan.json]] ] = NO_MICRO,
    [ [[echo '[]' >plan.json]] ] = NO_MICRO,
    [ [[echo 3 >plan.json]] ] = NO_MICRO,
    [ [[: >plan.json]] ] = "it is not the JSON of a plan",
    [ [[echo '{"micro":' >plan.json]] ] = "it is not the JSON of a plan",
    [ [[truncate -s 3G plan.json]] ] = "the file is longer than 1 MiB",
    [ [[rm plan.json; mkfifo plan.json]] ] = "cannot be read: this is not a regular file",
    [ [[ln -sf /dev/zero plan.json]] ] = "cannot be read: this is not a regular file",
    [ [[rm plan.json; mkdir plan.json]] ] = "cannot be read: Is a directory",
  } do
    prepare(command)
    ends(PIPE .. " --out again t.lua", 5, ("again/plan.json: %s%s"):format(why, ADVICE))
  end
  prepare "echo 3 >plan.json"
  ends("--ranks 2 --parallel pipe=auto --out again t.lua", 5,
       ("again/plan.json: %s%s"):format(NO_MICRO, ADVICE))
end)

T.test("a plan.json without a checkpoint is not read", function()
  prepare "rm step-*; : >plan.json"
  passes(PIPE .. " --out again t.lua")
  T.equal(micro_of "again", 4)
end)

T.test("a missing plan.json", function()
  local text = "luatrain: warning: again/plan.json is missing, so this run may have another number "
               .. "of micro-batches than the one that it resumes, and other results\n"
  prepare "rm plan.json"
  T.equal({passes(PIPE .. " --out again t.lua"), micro_of "again"}, {text, 4})
  prepare "rm plan.json"
  T.equal(passes "--ranks 2 --parallel pipe=auto --out again t.lua", text)
  prepare "rm plan.json"
  T.equal(passes(PIPE .. ",micro=3 --out again t.lua"), "")
  prepare "rm plan.json step-*"
  T.equal(passes(PIPE .. " --out again t.lua"), "")
  prepare "rm plan.json"
  T.equal(passes(PIPE .. " --out again --resume never t.lua"), "")
  prepare "rm plan.json"
  T.equal(passes(PIPE .. " --out other --resume again/step-00000005.safetensors t.lua"), text)
end)

T.test("another number of micro-batches than that of the resumed run", function()
  prepare ":"
  T.equal(passes(PIPE .. ",micro=2 --out again t.lua"),
          "luatrain: warning: again/plan.json was made with micro=3, but now it is 2\n")
  T.equal(micro_of "again", 2)
  prepare ":"
  T.equal({passes(PIPE .. " --out again t.lua"), micro_of "again"}, {"", 3})
end)

-- ==== Profiles ===================================================================================

T.test("a profile knows its rank and the number of ranks", function()
  for ranks, flags in pairs{"-n 1 --link 1", "", [4] = "-n 4 --link 1"} do
    local text = passes(("--ranks 2 plan %s t.lua --mode place"):format(flags))
    assert(text:find(("batch %d on %d rank"):format(4 * ranks, ranks), 1, true), text)
    local roots, all = count(text, ("root is 0 of %d\n"):format(ranks)), count(text, "here is")
    assert(roots > 0 and roots == (ranks == 1 and all or all / 2), text)
    T.equal(count(text, ("here is 0 of %d\n"):format(ranks)), roots)
  end
end)

T.test("the help of bench is shown once", function()
  local text = passes "--ranks 2 --parallel pipe=2 bench --help"
  T.equal(count(text, "usage: luatrain [options] bench"), 1)
end)

T.test("an error in a profile says so", function()
  local message = "t.lua:23: net is dead (while the script was profiled for --parallel pipe=P)"
  ends(PIPE .. " t.lua --mode dead", 1, message)
  ends("--ranks 2 plan t.lua --mode dead", 1, message)
end)

T.test("messages about the pipeline name no line of luatrain", function()
  for _, words in ipairs{"--ranks 2 --parallel pipe=2", PIPE, "--ranks 2 --parallel pipe=2 plan"} do
    ends(words .. " t.lua --mode no_net", 2, "--parallel pipe=P: the script ended before a "
         .. "backward pass, so there is no net to divide")
  end
  T.write(folder .. "/file", "")
  local text, code = run "--ranks 2 --out file/plans plan t.lua"
  T.equal(code, 3)
  assert(("\n" .. text):find("\nluatrain: file/plans: cannot create this folder", 1, true), text)
end)

T.test("a parameter of an earlier stage after the cut", function()
  ends("--ranks 2 --parallel pipe=2,cut=fc2 t.lua --mode late", 2, "t.lua:33: net.fc1 linear: a "
       .. "parameter belongs to stage 0 of the pipeline, but another input belongs to stage 1; "
       .. "parameters must be used in the order of the stages")
end)

T.test("lt.on_root cannot compute on another stage", function()
  T.write(folder .. "/root.lua", [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{norm = "sync_batch_norm", last = "fc"}
local set = lt.data.open "synthetic:8x8x1/4/64"
local net = nn.sequential{conv = nn.conv2d{1, 4, 3}, norm = nn[opt.norm]{4},
                          pool = nn.global_avg_pool2d(), fc = nn.linear{4, 4}}
local sgd = lt.optim.sgd(net, {lr = 0.1})
local run <close> = lt.run{net = net, optim = sgd, train = set, epochs = 1, batch = 16}
for _ in run:epochs() do
  for x, y in run:batches() do
    run:step(function()
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      sgd:step()
      return loss
    end)
    lt.on_root(function()
      local first = net.norm(net.conv(lt.ones{2, 8, 8, 1}))
      if opt.last == "fc" then net.fc(net.pool(first)) end
    end)
  end
end
]])
  local pipe = "--ranks %d --parallel pipe=2,micro=%d,cut=%s --timeout 20 --resume never "
               .. "--out root root.lua %s"
  local text = "root.lua:%d: net.%s: in a pipeline, computing on another stage requires all ranks, "
               .. "but lt.on_root runs on rank 0 only"
  local fc, norm = text:format(19, "fc linear"), text:format(18, "norm batch_norm")
  for _, ranks in ipairs{2, 4} do
    ends(pipe:format(ranks, 1, "fc", "--norm batch_norm"), 1, fc)
    ends(pipe:format(ranks, 2, "fc", "--norm batch_norm"), 1, fc)
    ends(pipe:format(ranks, 1, "norm", ""), 1, norm)
  end
  ends(pipe:format(2, 1, "fc", ""), 1, fc)
  ends(pipe:format(4, 1, "fc", ""), 1, "root.lua:18: net.norm batch_norm: sync requires all ranks, "
       .. "but lt.on_root runs on rank 0 only")
  passes(pipe:format(2, 1, "fc", "--last norm"))
end)

-- ==== Options ====================================================================================

T.test("a wrong --parallel is reported once", function()
  for _, mode in ipairs{"micro=2", "pipe", ",", "async=asgd,pipe=2"} do
    local message = mode:find "async" and "--parallel must be async=RULE"
                    or ("--parallel must begin with async=RULE or pipe=P, or be sync-server, but "
                        .. "is '%s'"):format(mode)
    local text, code = run(("--ranks 2 --parallel %s t.lua"):format(mode))
    T.equal({mode, code, count(text, "\n"), (text:find("luatrain: " .. message, 1, true))},
            {mode, 2, 1, 1})
  end
end)

T.test("cuts that name a frozen layer, a second name or no parameters", function()
  local cut = "--ranks 2 --parallel pipe=2,micro=4,cut=%s --resume never --out run t.lua"
  passes "--resume never --out run t.lua --accumulate 4"
  local wanted = assert(sha_of "run")
  for _, name in ipairs{"fc1", "fc1.w", "again", "conv2", "fc2"} do
    passes(cut:format(name))
    T.equal({name, sha_of "run"}, {name, wanted})
  end
  for _, name in ipairs{"relu", "pool"} do
    ends(cut:format(name), 2, ("--parallel: a stage cannot begin at %s, which has no parameters; "
                               .. "name a parameter or a module that has one"):format(name))
  end
  ends(cut:format "fc3", 2, "--parallel: the net has no parameter or module 'fc3'")
end)

T.test("the words of the planner's messages", function()
  ends("--ranks 2 --parallel pipe=1,data=2,micro=1,memory=1e-9 t.lua", 2,
       "--parallel: no plan fits into 1e-06 MB per rank on 2 ranks; allow more ranks or smaller "
       .. "micro-batches")
  ends("--ranks 1 --parallel pipe=1,memory=1e-9 t.lua", 2,
       "--parallel: no plan fits into 1e-06 MB per rank on 1 rank; allow more ranks or smaller "
       .. "micro-batches")
  T.write(folder .. "/one.lua", [[
local lt = require "luatrain"
local train, test = lt.data.open "synthetic:8x8x1/4/64"
local net = lt.nn.sequential{flatten = lt.nn.flatten(), fc = lt.nn.linear{64, 4}}
lt.fit{net = net, optim = lt.optim.sgd(net, {lr = 0.1}), train = train, test = test, epochs = 1,
       batch = 8}
]])
  ends("--ranks 2 --parallel pipe=2 one.lua", 2,
       "--parallel: the number of stages must be 1 for this job, but is 2")
end)

T.test("a net without parameters", function()
  T.write(folder .. "/none.lua", [[
local lt = require "luatrain"
for x in lt.data.open "synthetic:8x8x1/4/16":batches{batch = 8, shuffle = true, epoch = 1} do
  lt.step(function() (x:requires_grad() * 2):sum():backward() end)
end
]])
  T.equal(passes "--ranks 1 --parallel pipe=1 none.lua", "")
  for _, words in ipairs{"--parallel pipe=2", "--parallel pipe=auto", "plan"} do
    ends(("--ranks 2 %s none.lua"):format(words), 2, "--parallel: a net has at least 1 unit, not 0")
  end
end)

T.finish()
