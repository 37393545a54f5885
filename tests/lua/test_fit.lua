-- test_fit.lua - lt.run, lt.fit and lt.micro_batches: results, files and errors.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local folder = T.folder

-- n images of 4 x 4 in 3 classes. The row of bright pixels is the class.
local function make_set(n)
  local x, labels = lt.randn({n, 4, 4, 1}) * 0.5, {}
  for i = 1, n do
    labels[i] = i % 3
    for column = 1, 4 do x:set(i, labels[i] + 1, column, 1, 2) end
  end
  return lt.data.set{images = x, labels = lt.tensor(labels, {dtype = "i64"}), classes = 3}
end

local function make_net(dropout)
  return nn.sequential{nn.flatten(), nn.linear{16, 8}, nn.relu(), nn.dropout{dropout or 0.0},
                       nn.linear{8, 3}}
end

-- Settings of a run on n images, and a function for run:step.
local function settings(n, more)
  local net = make_net()
  local sgd = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9})
  local all = {net = net, optim = sgd, train = make_set(n), epochs = 2, batch = 8,
               out = folder() .. "/out"}
  for key, value in pairs(more or {}) do all[key] = value end
  return all, T.learn(net, sgd)
end

local events = T.events

T.test("lt.fit learns", function()
  local net, out = make_net(), folder()
  local train, test = make_set(90), make_set(31)
  local result = lt.fit{net = net, train = train, test = test, epochs = 10, batch = 16, out = out,
                        optim = lt.optim.adam(net, {lr = 0.02}), schedule = lt.schedule.cosine{}}
  assert(result.top1 > 0.9, result.top1)
  assert(result.loss < 0.4 and result.train_loss < 0.4)
  local steps, epochs, ends = events(out, "step"), events(out, "epoch"), events(out, "end")
  T.equal({#steps, #epochs, #ends}, {60, 10, 1})
  T.equal({ends[1].top1, ends[1].exit, ends[1].weights_sha256}, {result.top1, 0, net:sha256()})
  local copy = make_net():load(out .. "/weights.safetensors")
  T.equal(copy:sha256(), net:sha256())
  assert(io.open(out .. "/curves.svg"):read "a":find "^<svg")
end)

T.test("the lines that a run logs", function()
  local o, learn = settings(20, {schedule = function(epoch, epochs) return epoch / epochs end})
  local run <close> = lt.run(o)
  local seen, sums = {}, {0.0, 0.0}
  for epoch in run:epochs() do
    for x, y in run:batches() do
      local loss = run:step(learn, x, y)
      seen[#seen + 1] = {epoch, x:dim(1)}
      sums[epoch] = sums[epoch] + loss * x:dim(1)
    end
    run:report{top1 = 0.5, loss = 0.25, other = 7.123456}
  end
  T.equal(seen, {{1, 8}, {1, 8}, {1, 4}, {2, 8}, {2, 8}, {2, 4}})
  T.equal(run.result, {top1 = 0.5, loss = 0.25, other = 7.123456, train_loss = sums[2] / 20})

  local samples = {8, 16, 20, 28, 36, 40}
  for i, f in ipairs(events(o.out, "step")) do
    T.equal({f.step, f.epoch, f.samples}, {i, (i + 2) // 3, samples[i]})
    local middle = (samples[i] + (samples[i - 1] or 0)) / 2
    T.near(f.lr, 0.1 * middle / 40, 1e-12)
    local sum = 0.0
    for _, name in ipairs{"data", "forward", "backward", "exposed_comm", "optimizer", "other"} do
      assert(f[name] >= 0 and f[name] <= 1, name)
      sum = sum + f[name]
    end
    T.near(sum, 1, 5e-4)                           -- fractions are written with four digits
    assert(f.samples_per_s > 0)
  end
  for epoch, f in ipairs(events(o.out, "epoch")) do
    T.near(f.loss, sums[epoch] / 20, 1e-12)
    T.equal({f.top1, f.test_loss, f.other}, {0.5, 0.25, 7.123456})       -- not rounded as in a step
  end
end)

T.test("each epoch has each sample once, in the order of the loader", function()
  local o, learn = settings(21, {augment = false})
  local run <close> = lt.run(o)
  local seen = {}
  for _ in run:epochs() do
    for x, y in run:batches() do
      table.move(y:totable(), 1, #y, #seen + 1, seen)
      run:step(learn, x, y)
    end
  end
  local wanted = {}
  for epoch = 1, 2 do
    for _, y in o.train:batches{batch = 21, shuffle = true, epoch = epoch} do
      table.move(y:totable(), 1, #y, #wanted + 1, wanted)
    end
  end
  T.equal(seen, wanted)
end)

T.test("top(k) counts labels among the k largest logits", function()
  local z = lt.tensor{{5, 4, 3, 2, 1, 0}, {0, 1, 2, 3, 4, 5}, {1, 1, 1, 1, 1, 1}}
  local function count(k, ...)
    return lt.metrics.top(k).count(z, lt.tensor({...}, {dtype = "i64"})):item()
  end
  T.equal({count(1, 0, 5, 0), count(1, 1, 4, 1)}, {3, 0})
  T.equal({count(2, 1, 4, 5), count(2, 2, 3, 5)}, {3, 1})      -- equal logits are not larger
  T.equal({count(5, 4, 1, 0), count(5, 5, 0, 0), count(6, 5, 0, 0)}, {3, 1, 3})
  T.equal({count(9, 5, 0, 0), lt.metrics.top5.name}, {3, "top5"})
  -- NaN ranks above all numbers, and a label with a NaN logit is wrong.
  z = lt.tensor{{0, 0 / 0, 1, 0, 0, 0}, {0, 0, 0 / 0, 0, 0, 0}, {-1 / 0, 1 / 0, 0, 0, 0, 0}}
  T.equal({count(2, 2, 2, 1), count(2, 0, 0, 0)}, {2, 1})
  -- bf16 cannot represent all counts up to 300.
  local many = lt.arange(0, 300):reshape{1, 300}:cast "bf16"
  T.equal(lt.metrics.top(5).count(many, lt.tensor({299}, {dtype = "i64"})):item(), 1)
  T.equal(lt.metrics.top(5).count(many, lt.tensor({200}, {dtype = "i64"})):item(), 0)
end)

T.test("an evaluation returns its metrics", function()
  local net = make_net()
  local o = settings(16, {net = net, optim = lt.optim.sgd(net, {lr = 0.1})})
  local test = make_set(13)
  local run <close> = lt.run(o)
  local label_sum = {name = "label_sum", count = function(_, y) return y:sum():item() / 4 end}
  local got = run:evaluate(test, {batch = 5, metrics = {lt.metrics.top(2), label_sum}})
  T.equal(got.top1, nil)
  T.near(got.label_sum, test.labels:cast "f32":sum():item() / 4 / 13, 1e-12)
  assert(got.top2 > run:evaluate(test).top1 and got.top2 <= 1)
  T.equal(run:evaluate(test, {metrics = {}}).top1, nil)
end)

T.test("evaluation counts every sample once", function()
  local net = make_net(0.5)                        -- dropout changes results in train mode
  local o = settings(16, {net = net, optim = lt.optim.sgd(net, {lr = 0.1})})
  local test = make_set(13)
  local run <close> = lt.run(o)
  local got = run:evaluate(test, {batch = 5})
  local x, y = test.images, test.labels
  local logits = net:eval()(x)
  net:train()
  T.near(got.top1, logits:argmax(2):eq(y):sum():item() / 13, 1e-12)
  T.near(got.loss, lt.cross_entropy(logits, y):item(), 1e-6)
  T.near(run:evaluate(test, {loss = function(z) return z:mean() end}).loss, logits:mean():item(),
         1e-6)
  T.fails(function() run:evaluate(5) end,
          "run:evaluate: 'set' must be a set of lt.data, but is 5")
  T.fails(function() run:evaluate(test, 5) end,
          "run:evaluate requires options as a table: run:evaluate(set, {batch = 256}), but got "
          .. "a number")
  T.fails(function() run:evaluate(test, {loss = function() return "x" end}) end,
          "run:evaluate: 'loss' must return the loss, one number, but returned a string")
  T.fails(function() run:evaluate(test, {loss = function(z) return z end}) end,
          "run:evaluate: 'loss' must return the loss, one number, but returned a tensor 8x3 "
          .. "f32")
  T.fails(function() run:evaluate(test, {metrics = {lt.metrics.top1, lt.metrics.top(1)}}) end,
          "run:evaluate: two metrics are called 'top1'")
  T.fails(function() run:evaluate(test, {metrics = {{name = "loss", count = print}}}) end,
          'run:evaluate: a metric cannot be called "loss"')
  T.fails(function() run:evaluate(test, {metrics = {{name = "x"}}}) end,
          "metric: 'count' is missing: metric{name, count}")
  T.fails(function()
    run:evaluate(test, {metrics = {{name = "x", count = function() return {} end}}})
  end, "run:evaluate: metric 'x' must return a count, one number, but returned a table")
  T.fails(function() run:evaluate(test, {batches = 5}) end,
          "run:evaluate: unknown key 'batches' (did you mean 'batch'?)")
end)

T.test("evaluation restores the mode of each module, also after an error", function()
  local o = settings(16)
  local run <close> = lt.run(o)
  local function modes() return {o.net.training, o.net[2].training, o.net[4].training} end
  local function broken() error "mine" end
  for _, train in ipairs{true, false} do
    o.net[train and "train" or "eval"](o.net)
    o.net[4].training = not train                  -- a module with another mode
    local before = modes()
    run:evaluate(o.train)
    T.equal(modes(), before)
    assert(not pcall(run.evaluate, run, o.train, {loss = broken}))
    T.equal(modes(), before)
  end
end)

T.test("work between steps does not count in their times", function()
  local o, learn = settings(16)
  local large = make_set(20000)
  local run <close> = lt.run(o)
  for _ in run:epochs() do
    for x, y in run:batches() do
      run:evaluate(large, {batch = 100})
      run:step(learn, x, y)
      run:evaluate(large, {batch = 100})
      run:save()
    end
  end
  local wall_s = events(o.out, "end")[1].wall_s
  for _, f in ipairs(events(o.out, "step")) do
    for _, name in ipairs{"data", "forward", "backward", "optimizer", "other"} do
      assert(f[name] >= 0 and f[name] <= 1, name)
    end
    assert(16 / f.samples_per_s < 0.5 * wall_s)
  end
end)

T.test("an epoch without a report is reported when the next one begins", function()
  local o, learn = settings(8)
  local run <close> = lt.run(o)
  for _ in run:epochs() do
    for x, y in run:batches() do run:step(learn, x, y) end
  end
  T.equal(#events(o.out, "epoch"), 2)
  assert(run.result.train_loss and not run.result.top1)
end)

T.test("a run that is left early is saved, not complete", function()
  local o, learn = settings(8, {epochs = 9})
  do
    local run <close> = lt.run(o)
    for epoch in run:epochs() do
      for x, y in run:batches() do run:step(learn, x, y) end
      run:report()
      if epoch == 3 then break end
    end
  end
  local last = events(o.out, "end")[1]
  T.equal({last.exit, last.step, #events(o.out, "save")}, {0, 3, 3})
  assert(not io.open(o.out .. "/weights.safetensors"))
  local run <close> = lt.run(o)
  T.equal({run.epoch, run.steps}, {4, 3})
end)

T.test("a run that is left within an epoch resumes there", function()
  local o, learn = settings(40)
  do
    local run <close> = lt.run(o)
    for _ in run:epochs() do
      for x, y in run:batches() do
        if run.steps == 3 then break end           -- a batch without a step
        run:step(learn, x, y)
      end
      break
    end
  end
  local run <close> = lt.run(o)
  T.equal({run.epoch, run.steps, run.done}, {1, 3, 24})
end)

T.test("a run that is not closed warns", function()
  local o, learn = settings(8)
  do
    local run = lt.run(o)
    for _ in run:epochs() do
      for x, y in run:batches() do run:step(learn, x, y) end
      break
    end
  end
  collectgarbage()
  T.equal(T.warnings(o.out)[1],
          ("the run in %s was not closed: write local run <close> = lt.run{...}"):format(o.out))
  T.equal(#events(o.out, "end"), 1)
  T.equal(events(o.out, "end")[1].exit, nil)
  local _ <close> = lt.run(o)                      -- the folder is unlocked
end)

T.test("weights that are not finite are never saved", function()
  local function train(o, learn, spoil)
    local run <close> = lt.run(o)
    for epoch in run:epochs() do
      for x, y in run:batches() do run:step(learn, x, y) end
      if epoch == 2 then spoil(run) end
      run:report()
    end
  end
  for _, value in ipairs{0 / 0, math.huge} do
    for _, call in ipairs{"report", "save"} do
      local o, learn = settings(16, {epochs = 3})
      T.fails(function()
        train(o, learn, function(run)
          o.net[2].w:set(1, 1, value)
          run[call](run)
        end)
      end, "the weights are not finite after step 4 (2.w); check the learning rate and the "
           .. "data; the checkpoint of step 2 is the last good one")
      T.equal(events(o.out, "end")[1].exit, 6)
      T.equal({#events(o.out, "epoch"), #events(o.out, "save")}, {1, 1})
    end
  end
  local o, learn = settings(16)
  train(o, learn, function()
    for i = 1, 8 do o.net[2].w:set(i, 1, 3e38) end -- finite, but their sum is not
  end)
  T.equal(#events(o.out, "save"), 2)
end)

T.test("an error ends the run with its exit code", function()
  local o = settings(8)
  local function train(fn)
    local run <close> = lt.run(o)
    for _ in run:epochs() do
      for x in run:batches() do run:step(fn, x) end
    end
  end
  assert(not pcall(train, function() error "mine" end))
  assert(not pcall(train, function(x) return lt.matmul(x, x) end))
  T.fails(function() train(function(x) o.net(x * (0 / 0)):sum():backward() end) end,
          ("the loss is nan at step %d; check the learning rate and the data")
          :format(lt.steps() + 1))
  local exits = {}
  for i, last in ipairs(events(o.out, "end")) do
    exits[i] = last.exit
    assert(not last.top1, "nothing was reported")
  end
  T.equal(exits, {1, 1, 6})
end)

T.test("calls in the wrong order are errors", function()
  local o, learn = settings(16)
  local run <close> = lt.run(o)
  T.fails(function() run:batches() end,
          "run:batches: call it inside: for epoch in run:epochs() do ... end, before the report")
  T.fails(function() run:step(learn) end,
          "run:step: call it inside: for x, y in run:batches() do ... end")
  T.fails(function() run:report() end,
          "run:report: call it inside: for epoch in run:epochs() do ... end")
  local next_epoch = run:epochs()
  next_epoch()
  T.fails(function() run:epochs() end,
          "run:epochs: it was already called, and a run is one loop")
  T.fails(function() run:step(learn) end,
          "run:step: each batch of run:batches has exactly one step")
  T.fails(function() run:report() end, "run:report: the epoch had no steps: "
                                       .. "for x, y in run:batches() do run:step(...) end")
  local left = run:batches()
  run:step(learn, left())
  for x, y in run:batches() do                   -- the rest of the epoch
    T.fails(function() left() end, "run:batches: another loop over the batches was started")
    run:step(function() return learn(x, y) end)
    break
  end
  for x, y in run:batches() do
    run:step(learn, x, y)
    T.fails(function() run:step(learn, x, y) end,
            "run:step: each batch of run:batches has exactly one step")
  end
  run:report()
  T.fails(function() run:report() end, "run:report: this epoch was already reported")
  next_epoch()
  T.fails(function()
    for _ in run:batches() do end
  end, "run:batches: the previous batch had no run:step")
  for x, y in run:batches() do
    T.fails(function() run:step(function() return 1 end) end,
            "run:step: the function took no optimizer step; "
            .. "use lt.micro_batches to accumulate gradients")
    T.fails(function() run:step(function() o.optim:step() return 1 end) end,
            "an optimizer step has no gradients: no backward has run since the last step; "
            .. "call backward on the loss first")
    T.fails(function() run:step(function() end) end,
            "run:step: the function must return the loss, one number, but returned a nil")
    T.fails(function() run:step(5) end, "run:step requires a function, but got 5")
    T.fails(function() run:step() end, "run:step requires a function, but got nil")
    T.fails(function() run.step(learn, x, y) end,
            "run:step must be called with a colon: run:step(...)")
    T.fails(function() run:step(function() run:evaluate(o.train) end) end,
            "run:evaluate must not be called inside run:step")
    T.fails(function() run:step(function() run:save() end) end,
            "run:save must not be called inside run:step")
    run:step(learn, x, y)
  end
  T.fails(function() run:report{top1 = "good"} end,
          "run:report requires numbers by name, but top1 is a string")
  T.fails(function() run:report(5) end,
          "run:report requires numbers by name, as run:evaluate returns them, but got a number")
  T.fails(function() run:report{["gr\xfcn"] = 5} end,
          'run:report requires names in printable UTF-8, but got "gr\xfcn"')
  for _, name in ipairs{"epoch", "wall_s", "train_loss", "t"} do
    T.fails(function() run:report{[name] = 1} end,
            ("run:report: luatrain reports '%s' itself; choose another name"):format(name))
  end
  T.fails(function() run:report{loss = 1, test_loss = 1} end,
          "run:report: luatrain reports 'test_loss' itself; choose another name")
  T.equal(next_epoch(), nil)
  T.fails(function() run:evaluate(o.train) end, "run:evaluate: this run is over")
  T.fails(function() run:report() end, "run:report: this run is over")
  T.fails(function() return run.batchs end, "a run has no 'batchs' (did you mean 'batches'?)")
  T.fails(function() run.lr = 5 end, "a run has no settable field 'lr'")
end)

T.test("settings are checked before a run writes anything", function()
  local usage = "lt.run{net, optim, train, epochs, batch; schedule?, loss?, augment?, mixup=0.0, "
                .. "sizes?, target?, workers?, out?, resume?, save_every?, max_steps?, amp?, "
                .. "scaler?}"
  local function refused(change, message)
    local o = settings(10, change)
    T.fails(function() lt.run(o) end, message)
    assert(not io.open(o.out), "it made a folder")
  end
  refused({net = false}, "lt.run: 'net' must be a net, but is false")
  refused({optim = {}}, "lt.run: 'optim' must be an optimizer of lt.optim or a list of them, but "
                        .. "is a table")
  refused({train = 5}, "lt.run: 'train' must be a set of lt.data, but is 5")
  refused({schedule = 5}, "lt.run: 'schedule' must be a function, but is 5")
  refused({epoch = 5}, "lt.run: unknown key 'epoch' (did you mean 'epochs'?)")
  refused({augment = true}, "lt.run: 'augment' must be a table of options, or false, but is true")
  refused({augment = {flips = true}}, "augment: unknown key 'flips' (did you mean 'flip'?)")
  refused({batch = 11},
          "lt.run: batch must be at most the 10 images of the training set, but is 11")
  refused({optim = lt.optim.sgd(make_net(), {lr = 0.1})},
          "lt.run: the optimizer has no parameter of the net; it was made for another net")
  refused({out = ""}, "lt.run: 'out' must be a path, but is ''")
  T.fails(function() lt.run{} end, "lt.run: 'net' is missing: " .. usage)
  T.fails(function() lt.fit{lr = 5} end, "lt.fit: unknown key 'lr'" .. select(2, pcall(lt.fit, {}))
                                         :match "missing(: .*)$")
end)

T.test("lt.fit checks its sets and its loss", function()
  local o = settings(10, {test = make_set(6)})
  local function refused(change, message)
    local all = {}
    for key, value in pairs(o) do all[key] = value end
    for key, value in pairs(change) do all[key] = value end
    T.fails(function() lt.fit(all) end, message)
  end
  local function set(height, width, classes)
    return lt.data.set{images = lt.zeros({6, height, width, 1}), classes = classes,
                       labels = lt.zeros({6}, {dtype = "i64"})}
  end
  refused({loss = lt.cross_entropy, label_smoothing = 0.1},
          "lt.fit: label_smoothing applies only to lt.fit's own loss, not to a function 'loss'")
  refused({test = set(4, 5, 3)},
          "lt.fit: the images of the test set are 4x5x1, but those of the training set "
          .. "are 4x4x1")
  refused({test = set(4, 4, 4)}, "lt.fit: the test set has 4 classes, but the training set has 3")
  assert(not io.open(o.out), "it made a folder")
  refused({loss = function() return 5 end},
          "lt.fit: 'loss' must return a tensor of one number, but returned a number")
  refused({loss = function(logits) return logits end},
          "lt.fit: 'loss' must return a tensor of one number, but returned a tensor 8x3 f32")
end)

T.test("a schedule that returns no factor", function()
  for _, item in ipairs{{nil, "a nil"}, {"x", "a string"}, {-0.5, "-0.5"}, {math.huge, "inf"}} do
    local returned, shown = item[1], item[2]
    local o, learn = settings(8, {schedule = function() return returned end})
    local run <close> = lt.run(o)
    run:epochs()()
    local x, y = run:batches()()
    T.fails(function() run:step(learn, x, y) end,
            "run:step: the schedule must return a non-negative number, but at epoch 0.5 it "
            .. "returned " .. shown)
  end
end)

T.test("one run at a time in a folder", function()
  local o = settings(8)
  local run <close> = lt.run(o)
  for _, out in ipairs{o.out, o.out .. "/", o.out .. "/."} do
    T.fails(function() lt.run((settings(8, {out = out}))) end,
            ("lt.run: this script has a run in %s that is not closed: write local run <close> = "
             .. "lt.run{...}"):format((out:gsub("/$", ""))))
  end
  T.equal(run.folder, o.out)
end)

T.test("a run that waits for its data warns with the reason", function()
  local waits = require "luatrain.train.data_wait"
  local function warning_of(waited, stats)
    local w, text = waits.new(), nil
    for step = 1, 200 do
      local said = w:step(waited, 0.125, 32, {stats = function() return stats end})
      if said then
        assert(not text, "a second warning")
        text = said
        T.equal(step, 50)
      end
    end
    return text
  end
  local stats = {wait_s = 5.0, work_s = 8.0, images = 4000, workers = 1}
  T.equal(warning_of(0.01, stats), nil)
  T.equal(warning_of(0.0625, {work_s = 0.0, images = 0, workers = 0}):match "(.*) =",
          "the last 50 steps spent 50 % of their time waiting for data. No workers prepare it in "
          .. "advance: set workers")
  local text = warning_of(0.0625, stats)
  assert(text:find("An image takes 2.00 ms; 1 worker prepares 500 images per second, "
                   .. "but the net could process 512. ", 1, true), text)
end)

-- ==== Micro-batches ==============================================================================

-- The loss and the gradients of a batch in k micro-batches, as one list.
local function gradients(net, k, x, y)
  net:zero_grad()
  local loss = 0.0
  for x_i, y_i, share in lt.micro_batches(k, x, y) do
    loss = loss + lt.step(function()
      local part = lt.cross_entropy(net(x_i), y_i) * share
      part:backward()
      return part:item()
    end)
  end
  local list = {loss}
  for _, p in ipairs(net:parameters()) do
    for _, value in ipairs(p.grad:reshape({p:count()}):totable()) do list[#list + 1] = value end
  end
  return list
end

T.test("micro-batches give the gradients of the whole batch", function()
  local net = make_net(0.5)
  for _, rows in ipairs{32, 30, 3, 1} do
    local set = make_set(rows)
    local whole = gradients(net, 1, set.images, set.labels)
    for _, k in ipairs{2, 4, 32} do
      local parts = gradients(net, k, set.images, set.labels)
      for i, value in ipairs(whole) do T.near(parts[i], value, 1e-6) end
    end
  end
  local sizes, shares = {}, 0.0
  local set = make_set(10)
  for x, y, share in lt.micro_batches(4, set.images, set.labels) do
    T.equal(#x, #y)
    sizes[#sizes + 1], shares = #x, shares + share
  end
  T.equal(sizes, {3, 2, 3, 2})           -- as lt_shard() divides a batch among ranks
  T.near(shares, 1, 1e-12)
  net:zero_grad()
end)

T.test("invalid arguments of lt.micro_batches", function()
  local x, y = lt.zeros({5, 2}), lt.zeros({5}, {dtype = "i64"})
  T.fails(function() lt.micro_batches(0, x, y) end,
          "lt.micro_batches: 'k' must be a positive integer, but is 0")
  T.fails(function() lt.micro_batches(2, x) end,
          "lt.micro_batches: 'y' must be a tensor, but is nil")
  T.fails(function() lt.micro_batches(2, {}, y) end,
      "lt.micro_batches: 'x' must be a tensor, but is a table")
  T.fails(function() lt.micro_batches(2, x, lt.zeros({4})) end,
      "lt.micro_batches: x has 5 samples, but y has 4")
end)

-- The weights after lt.fit with a batch of 32 in micro-batches, as one list.
local function fitted(accumulate)
  lt.seed(5)
  local net = make_net()
  for i, p in ipairs(net:parameters()) do p:copy(lt.randn(p.shape) * (0.1 * i)) end
  lt.fit{net = net, train = make_set(70), test = make_set(5), epochs = 2, batch = 32,
         accumulate = accumulate, optim = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9}),
         label_smoothing = 0.1, out = folder()}
  local list = {}
  for _, p in ipairs(net:parameters()) do
    for _, value in ipairs(p:reshape({p:count()}):totable()) do list[#list + 1] = value end
  end
  return list
end

T.test("lt.fit in micro-batches takes the same steps", function()
  local whole, parts = fitted(1), fitted(4)
  for i, value in ipairs(whole) do T.near(parts[i], value, 1e-6) end
end)

T.test("accumulate larger than the batch", function()
  local train, test = lt.data.open "synthetic:2x2x1/2/8"
  local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{4, 2}}
  local result = lt.fit{
    net = net, optim = lt.optim.sgd(net, {lr = 0.1}), train = train, test = test, epochs = 1,
    batch = 4, accumulate = math.maxinteger, out = T.folder() .. "/out"}
  assert(result.top1)
end)

T.finish()
