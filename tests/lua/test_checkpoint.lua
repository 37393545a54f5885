-- test_checkpoint.lua - runs that stop and resume: which checkpoint is used, what it contains, and
-- which ones are refused. tests/tools/test_resume kills whole processes.
local lt = require "luatrain"
local checkpoint = require "luatrain.train.checkpoint"
local nn = lt.nn
local T = require "lt_test"

local folder = T.folder

local function noise(n)
  local labels = {}
  for i = 1, n do labels[i] = i % 3 end
  return lt.data.set{images = lt.randn({n, 4, 4, 1}), labels = lt.tensor(labels, {dtype = "i64"}),
                     classes = 3}
end

local train, test = noise(30), noise(10)

-- Returns the same net at each call.
local function make_net(width)
  width = width or 2
  local net = nn.sequential{nn.conv2d{1, width, 3, pad = 1}, nn.batch_norm{width}, nn.relu(),
                            nn.flatten(), nn.linear{16 * width, 3}}
  for _, p in ipairs(net:parameters()) do
    local values = {}
    for i = 1, p:count() do values[i] = math.sin(i) end
    p:copy(lt.tensor(values))
  end
  return net
end

-- Trains until the end, or until the run is stopped. Returns the net, the report and the error.
local function train_net(out, more)
  local o = {net = make_net(), train = train, epochs = 3, batch = 8, out = out,
             schedule = lt.schedule.linear{}}
  for key, value in pairs(more or {}) do o[key] = value end
  o.optim = o.optim or lt.optim.sgd(o.net, {lr = 0.05, momentum = 0.9})
  o.test = o.test or test
  local ok, result = pcall(lt.fit, o)
  return o.net, ok and result, not ok and result
end

local function names(path) return (T.names(path):gsub("^%.lock ", "")) end

-- The fields of steps and epochs in metrics.jsonl, without measured times.
local function metrics(path)
  local list = {}
  for line in io.lines(path .. "/metrics.jsonl") do
    local event = line:match '^{"event":"(%a+)"'
    if event == "step" then
      list[#list + 1] = line:match '"step":.*"lr":[%d.e-]+'
    elseif event == "epoch" then
      list[#list + 1] = line:match '"step":.*"test_loss":[%d.e-]+'
    end
  end
  return table.concat(list, "\n")
end

local whole = folder()
local whole_net, whole_result = train_net(whole)
assert(whole_result)

-- The message of an error, without its line number.
local function message(err) return (err:gsub("^[^:]*:%d+: ", "")) end

T.test("a run in several parts equals the uninterrupted run", function()
  for _, cuts in ipairs{{1, 2, 3}, {4}, {5, 9}, {8}, {11}, {12}} do
    local out = folder()
    for _, step in ipairs(cuts) do
      local _, _, err = train_net(out, {max_steps = step})
      local wanted = ("stopped by max_steps at step %d, saved in %s; remove or raise it, then "
                      .. "resume with:\n  "):format(step, out)
      assert(err:find(wanted, 1, true), err)
    end
    local net, result = train_net(out)
    T.equal(net:sha256(), whole_net:sha256())
    T.equal(result, whole_result)
    T.equal(metrics(out), metrics(whole))
  end
end)

T.test("an optimizer that counts its steps resumes", function()
  local function train_adam(out, more)
    local net = make_net()
    local o = {net = net, optim = lt.optim.adam(net, {lr = 0.01})}
    for key, value in pairs(more or {}) do o[key] = value end
    return train_net(out, o):sha256()
  end
  local out = folder()
  train_adam(out, {max_steps = 5})
  T.equal(train_adam(out), train_adam(folder()))
end)

-- The last layer is frozen for the first five steps. `old`: save as an older version did, with one
-- count for all parameters.
T.test("a checkpoint has the count of steps of each parameter; an older one loads", function()
  local function counts(out, stop, old)
    local net = make_net()
    local adam = lt.optim.adam(net, {lr = 0.01})
    local state = adam.state
    if old then
      rawset(adam, "state", function(self)
        local list = state(self)
        for name in pairs(list) do
          if name:find "^step%." then list[name] = nil end
        end
        return list
      end)
    end
    local net_5, learn = net[5], T.learn(net, adam)
    pcall(function()
      local run <close> = lt.run{net = net, optim = adam, train = train, epochs = 3, batch = 8,
                                 out = out, max_steps = stop}
      for _ in run:epochs() do
        for x, y in run:batches() do
          net_5:freeze(run.steps < 5)
          run:step(learn, x, y)
        end
      end
    end)
    local list = state(adam)
    return {list["step.1.w"]:item(), list["step.5.w"]:item(), list.steps:item()}, net:sha256()
  end
  local out, old = folder(), folder()
  local _, sum = counts(folder())
  T.equal(counts(out, 7), {7, 2, 7})
  local all, resumed = counts(out)
  T.equal(all, {12, 7, 12})
  T.equal(resumed, sum)
  counts(old, 7, true)
  T.equal(counts(old), {12, 12, 12})
end)

T.test("a complete run stays complete", function()
  local before = metrics(whole)
  local net, result = train_net(whole)
  T.equal(net:sha256(), whole_net:sha256())
  T.equal(result, whole_result)
  T.equal(metrics(whole), before)
end)

T.test("a complete run resumes with more epochs", function()
  local out, long = folder(), folder()
  train_net(out, {schedule = lt.schedule.constant{}})
  local net = train_net(out, {schedule = lt.schedule.constant{}, epochs = 4})
  T.equal(net:sha256(), train_net(long, {schedule = lt.schedule.constant{}, epochs = 4}):sha256())
  T.equal(metrics(out), metrics(long))
end)

T.test("two checkpoints are kept, and no partial files", function()
  local out = folder()
  train_net(out, {save_every = 3, max_steps = 7})
  T.equal(names(out), "metrics.jsonl step-00000006.safetensors step-00000007.safetensors")
  T.write(out .. "/step-00000009.safetensors.tmp0", "x")
  T.write(out .. "/curves.svg.tmp0", "x")
  train_net(out, {save_every = 3})
  T.equal(names(out), "curves.svg metrics.jsonl step-00000009.safetensors "
                      .. "step-00000012.safetensors weights.safetensors")
end)

-- A run that was stopped at step 7, with checkpoints of steps 6 and 7.
local function stopped_run()
  local out = folder()
  train_net(out, {save_every = 3, max_steps = 7})
  return out, out .. "/step-00000006.safetensors", out .. "/step-00000007.safetensors"
end

T.test("a damaged checkpoint is reported, and the previous one used", function()
  local good
  do
    local _, _, newest = stopped_run()
    good = T.read(newest)
  end
  local damages = {good:sub(1, -2), good:sub(1, 7), "", good:sub(1, #good // 2)}
  for _, place in ipairs{1, 20, 150, #good // 2, #good} do
    damages[#damages + 1] = good:sub(1, place - 1) .. string.char(good:byte(place) ~ 4)
                            .. good:sub(place + 1)
  end
  for _, text in ipairs(damages) do
    local out, before, newest = stopped_run()
    T.write(newest, text)
    local net = train_net(out)
    T.equal(net:sha256(), whole_net:sha256())
    T.equal(metrics(out), metrics(whole))
    local said = T.warnings(out)
    T.equal(#said, 1)
    assert(said[1]:find(newest, 1, true), said[1])
    assert(said[1]:find("; resuming from " .. before, 1, true), said[1])
  end
end)

T.test("a run with only damaged checkpoints does not start over", function()
  local out, before, newest = stopped_run()
  T.write(before, "short")
  T.write(newest, "")
  local said, sums = metrics(out), names(out)
  local _, _, err = train_net(out)
  local text = message(err)
  assert(text:find(out .. ": no checkpoint can be read, and --resume never starts over:\n  "
                   .. newest, 1, true), text)
  assert(text:find("\n  " .. before, 1, true), text)
  T.equal(metrics(out), said)
  T.equal(names(out), sums)
  T.write(out .. "/weights.safetensors", "old")
  T.write(out .. "/curves.svg", "old")
  train_net(out, {resume = "never", max_steps = 1})
  T.equal(names(out), "metrics.jsonl step-00000001.safetensors")
  local net = train_net(out, {resume = "never"})
  T.equal(net:sha256(), whole_net:sha256())
  T.equal(metrics(out), metrics(whole))
end)

T.test("a file without a digest is not a checkpoint", function()
  local out, before, newest = stopped_run()
  local text = T.read(newest):gsub('"sha256"', '"sha_!_"', 1)    -- removes the digest
  T.write(newest, text)
  local _, result, err = train_net(out)
  assert(result, err)
  local file <close> = assert(io.open(out .. "/metrics.jsonl"))
  assert(file:read "a":find(newest .. " has no digest: it is not a checkpoint of luatrain, "
                            .. "or is damaged; resuming from " .. before, 1, true))
end)

local MISNAMED = "%s: the name says step %s, but the file has step %d, which is used; resuming "
                 .. "from %s"

T.test("a copy of a checkpoint under a later name is not the newest", function()
  local out, before, newest = stopped_run()
  local copy = out .. "/step-00000099.safetensors"
  T.write(copy, T.read(before))
  T.equal(checkpoint.newest_step(out), 7)
  train_net(out, {max_steps = 9})
  T.equal(T.warnings(out), {MISNAMED:format(copy, "99", 6, newest)})
  T.equal(names(out), "metrics.jsonl step-00000008.safetensors step-00000009.safetensors "
                      .. "step-00000099.safetensors")
  T.equal(train_net(out):sha256(), whole_net:sha256())       -- from step 9
  T.equal(metrics(out), metrics(whole))
  assert(T.read(copy) ~= T.read(out .. "/step-00000012.safetensors"))
end)

T.test("the newest checkpoint under an earlier name is used, and not pruned", function()
  for _, name in ipairs{"step-00000002.safetensors", "step-6000000000000000000000.safetensors"} do
    local out, _, newest = stopped_run()
    local moved = out .. "/" .. name
    os.rename(newest, moved)
    T.equal(train_net(out, {save_every = 1}):sha256(), whole_net:sha256())
    T.equal(metrics(out), metrics(whole))
    T.equal(T.warnings(out), {MISNAMED:format(moved, name:match "0*(%d+)", 7, moved)})
    assert(names(out):find(name, 1, true), names(out))
  end
end)

T.test("a damaged step number is reported, and the previous checkpoint used", function()
  local out, before, newest = stopped_run()
  local text, n = T.read(newest):gsub('"step":"7"', '"step":"3"')
  T.equal(n, 1)
  T.write(newest, text)
  T.equal(train_net(out):sha256(), whole_net:sha256())
  local said = T.warnings(out)
  T.equal(#said, 1)
  assert(said[1]:find(newest .. ": it is damaged: ", 1, true), said[1])
  assert(said[1]:find("; resuming from " .. before, 1, true), said[1])
end)

T.test("of two copies of a checkpoint, the one with the usual name is used and pruned", function()
  local out, _, newest = stopped_run()
  T.write(out .. "/step-7.safetensors", T.read(newest))
  T.write(out .. "/step-00000005.safetensors", T.read(newest))
  train_net(out, {max_steps = 9})
  T.equal(T.warnings(out), {MISNAMED:format(out .. "/step-00000005.safetensors", "5", 7,
                                          newest)})
  T.equal(names(out), "metrics.jsonl step-00000005.safetensors step-00000008.safetensors "
                      .. "step-00000009.safetensors step-7.safetensors")
end)

T.test("the name of a file given as --resume is not trusted either", function()
  local _, before = stopped_run()
  local copy, branch = folder() .. "/step-00000099.safetensors", folder()
  T.write(copy, T.read(before))
  T.equal(train_net(branch, {resume = copy}):sha256(), whole_net:sha256())
  T.equal(T.warnings(branch), {MISNAMED:format(copy, "99", 6, copy)})
  T.write(branch .. "/step-00000099.safetensors", T.read(before))
  local _, _, err = train_net(branch, {resume = copy})
  assert(err:find(branch .. " has a newer checkpoint, of step 12;", 1, true), err)
  os.remove(branch .. "/step-00000012.safetensors")
  os.remove(branch .. "/step-00000008.safetensors")
  assert(train_net(branch, {resume = copy}))           -- a copy of step 6 is not newer
end)

T.test("--resume FILE in another folder leaves that folder's older files alone", function()
  local _, _, newest = stopped_run()
  local branch = folder()
  train_net(branch, {max_steps = 2})
  T.equal(train_net(branch, {resume = newest}):sha256(), whole_net:sha256())
  T.equal(names(branch), "curves.svg metrics.jsonl step-00000002.safetensors "
                         .. "step-00000008.safetensors step-00000012.safetensors "
                         .. "weights.safetensors")
end)

T.test("a file that --resume never cannot remove is an error", function()
  local out = stopped_run()
  os.execute(("mkdir -p %s/step-00000099.safetensors/x"):format(out))
  local _, _, err = train_net(out, {resume = "never"})
  T.equal(message(err), ("--resume never: cannot remove %s/step-00000099.safetensors: Directory "
                         .. "not empty"):format(out))
end)

T.test("a checkpoint of another training is refused", function()
  local out, _, newest = stopped_run()
  local function refused(more, wanted)
    local _, _, err = train_net(out, more)
    T.equal(message(err), wanted)
  end
  refused({net = make_net(3)},
          newest .. " does not fit: net.1.w is 2x3x3x1, but the net has 3x3x3x1; net.1.b is 2, but "
          .. "the net has 3; net.2.scale is 2, but the net has 3; net.2.shift is 2, but the net "
          .. "has 3; net.2.mean is 2, but the net has 3; net.2.var is 2, but the net has 3; "
          .. "net.5.w is 3x32, but the net has 3x48")
  local net = make_net()
  refused({net = net, optim = lt.optim.sgd(net, {lr = 0.05})},
          newest .. " does not fit: optim.v.1.b is not in the optimizer; optim.v.1.w is not in the "
          .. "optimizer; optim.v.2.scale is not in the optimizer; optim.v.2.shift is not in the "
          .. "optimizer; optim.v.5.b is not in the optimizer; optim.v.5.w is not in the optimizer")
  for was, makes in pairs{sgd = "adam", lars = "sgd", adam = "adamw"} do
    local from, before = folder(), lt.optim[was](net, {lr = 0.05})
    train_net(from, {max_steps = 1, net = net, optim = before})
    local _, _, err = train_net(from, {net = net, optim = lt.optim[makes](net, {lr = 0.05})})
    T.equal(message(err), ("%s/step-00000001.safetensors was made with optim.%s, but the script "
                           .. "now makes optim.%s; start a new run with another --out")
                          :format(from, was, makes))
  end
  refused({train = noise(31)},
          newest .. " was made with a training set of 30 images, but now it has 31; start a new "
          .. "run with another --out")
  local images, labels = lt.randn({30, 4, 5, 1}), train.labels
  local wide = lt.data.set{images = images, labels = labels, classes = 3}
  refused({train = wide, test = wide},
          newest .. " was made with images of 4x4x1, but now they are 4x5x1; start a new run with "
          .. "another --out")
  refused({train = lt.data.set{images = train.images, labels = labels, classes = 4}},
          newest .. " was made with 3 classes, but now there are 4; start a new run with another "
          .. "--out")
  local seed = lt.seed()
  lt.seed(seed + 1)
  refused({}, ("%s was made with seed %d, but now it is %d; resume with --seed %d, or start a "
               .. "new run with another --out"):format(newest, seed, seed + 1, seed))
  lt.seed(seed)
  refused({resume = whole .. "/weights.safetensors"},
          whole .. "/weights.safetensors is not a checkpoint of a run")
  local empty = folder()
  refused({resume = empty}, ("--resume %s: it has no checkpoint"):format(empty))
  refused({resume = out .. "/step-00000006.safetensors"},
          ("--resume %s/step-00000006.safetensors: %s has a newer checkpoint, of step 7; remove it "
           .. "or name another --out"):format(out, out))
  T.equal(train_net(out):sha256(), whole_net:sha256())
end)

T.test("another run may resume from a checkpoint", function()
  local out, before, newest = stopped_run()
  for _, from in ipairs{out, before, newest} do
    local branch = folder()
    T.equal(train_net(branch, {resume = from}):sha256(), whole_net:sha256())
    assert(T.read(branch .. "/metrics.jsonl"):find '"step":8,')
  end
end)

T.test("a changed batch size causes a warning", function()
  local out, _, newest = stopped_run()
  local _, result = train_net(out, {batch = 10})
  assert(result)
  T.equal(T.warnings(out), {newest .. " was made with batches of 8 images, but now they have 10"})
end)

-- Trains in a loop that calls change(optim) at the start of epoch 2, and stops after max_steps, if
-- given. Returns the net and the optimizer.
local function train_by_hand(out, options, change, max_steps)
  local net = make_net()
  local groups = {{params = {table.unpack(net:parameters(), 1, 4)}},
                  {params = {table.unpack(net:parameters(), 5)}, lr = options.lr2}}
  local sgd = lt.optim.sgd(groups, {lr = options.lr or 0.05, momentum = 0.9})
  local learn = T.learn(net, sgd)
  pcall(function()
    local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 3, batch = 8,
                               schedule = options.schedule, out = out, max_steps = max_steps}
    for epoch in run:epochs() do
      if epoch == 2 and run.done == 0 then change(sgd) end
      for x, y in run:batches() do
        run:step(learn, x, y)
      end
    end
  end)
  return net, sgd
end

T.test("settings that the script changes during the run persist", function()
  local changes = {
    function(sgd) sgd.lr = 0.01 end, function(sgd) sgd.momentum = 0.5 end,
    function(sgd) sgd.clip, sgd.weight_decay, sgd.nesterov = 0.25, 0.1, true end,
    function(sgd) sgd.lr_factor, sgd.decay_bias = 0.5, false end,
    function(sgd) sgd.groups[1].lr, sgd.groups[2].lr = 0.01, nil end,
  }
  for _, change in ipairs(changes) do
    local out, options = folder(), {lr2 = 0.2}
    local wanted = train_by_hand(folder(), options, change):sha256()
    train_by_hand(out, options, change, 5)
    train_by_hand(out, options, change, 7)               -- restored settings are saved again
    T.equal(train_by_hand(out, options, change):sha256(), wanted)
    T.equal(T.warnings(out), {})
  end
  local function nothing() end
  local out, options = folder(), {schedule = lt.schedule.cosine{}}
  local wanted = train_by_hand(folder(), options, nothing):sha256()
  train_by_hand(out, options, nothing, 5)
  T.equal(train_by_hand(out, options, nothing):sha256(), wanted)
end)

T.test("settings that the user has edited in the script apply, with a warning", function()
  local out = folder()
  local function change(sgd) sgd.lr = 0.01 end
  train_by_hand(out, {lr2 = 0.2}, change, 5)
  local _, sgd = train_by_hand(out, {lr = 0.02, lr2 = 0.1}, change)
  local made = out .. "/step-00000005.safetensors was made with "
  T.equal(T.warnings(out), {made .. "2.lr = 0.2, but the script now has 0.1, which is used",
                          made .. "lr = 0.01, but the script now has 0.02, which is used"})
  T.equal({sgd.lr, sgd.groups[2].lr}, {0.02, 0.1})
end)

T.test("a changed number of epochs causes a warning", function()
  local out, _, newest = stopped_run()
  train_net(out, {epochs = 4})
  T.equal(T.warnings(out), {newest .. " was made for 3 epochs, but now there are 4"})
end)

T.test("a resumed run keeps the numbers of its report", function()
  local out, net = folder(), make_net()
  local reported = {top1 = 0.1, loss = 0 / 0, high = math.huge, low = -math.huge, n = 3,
                    ['a "name"'] = 1 / 3}
  local function new_run()
    return lt.run{net = net, optim = lt.optim.sgd(net, {lr = 0.01}), train = train, epochs = 3,
                  batch = 30, out = out}
  end
  do
    local run <close> = new_run()
    for _ in run:epochs() do
      for x, y in run:batches() do
        run:step(T.learn(net, run.settings.optim), x, y)
      end
      run:report(reported)
      break
    end
  end
  local run <close> = new_run()
  for name, value in pairs(reported) do
    if value == value then T.equal(run.result[name], value) end
  end
  assert(run.result.loss ~= run.result.loss)
end)

T.test("a resumed run continues its clock", function()
  local out = folder()
  local function last(kind, name)
    local list = T.events(out, kind)
    return list[#list][name]
  end
  local function slow(logits, y)                         -- the clock is written in milliseconds
    os.execute "sleep 0.01"
    return lt.cross_entropy(logits, y)
  end
  train_net(out, {max_steps = 4, loss = slow})           -- after epoch 1, before its evaluation
  local before = last("end", "wall_s")
  train_net(out, {max_steps = 5, loss = slow})
  local saved = last("start", "t")                       -- the time after the save is dropped
  assert(saved > 0 and saved <= before and last("end", "wall_s") > saved)
  local per_s, wall_s = last("epoch", "samples_per_s"), last("epoch", "wall_s")
  assert(wall_s > 0 and wall_s <= before)
  T.near(30 / per_s, wall_s, 6e-4)                       -- written with three digits
end)

T.test("net:load reads the net of a checkpoint", function()
  local out = stopped_run()
  local pipe <close> = io.popen("ls " .. out .. "/step-*")
  local path = pipe:read "l"
  local net, file = make_net(), lt.load(path)
  net:load(path)
  for name, tensor in net:named_parameters() do
    T.equal({name, lt.ne(tensor, file["net." .. name]):sum():item()}, {name, 0})
  end
  T.raises(path .. " does not fit: net.w is missing; net.b is missing; net.1.w is",
           nn.linear{2, 2}.load, nn.linear{2, 2}, path)
end)

T.test("a failed save is reported, and the old checkpoint kept", function()
  local out = stopped_run()
  os.execute(("mkdir -p %s/step-00000008.safetensors/x"):format(out))  -- in the way
  local net, result = train_net(out, {save_every = 8})
  assert(result)
  T.equal(net:sha256(), whole_net:sha256())
  local said = table.concat(T.warnings(out), "\n")
  local failed = ("step 8 was not saved: %s/step-00000008.safetensors: "):format(out)
  assert(said:find(failed, 1, true), said)
  assert(said:find "; training continues\n", said)
  assert(said:find "\n2 checkpoints could not be saved$", said)
end)

T.finish()
