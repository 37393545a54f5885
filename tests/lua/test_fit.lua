-- test_fit.lua - lt.run, lt.fit and lt.pieces: what a loop computes, writes and refuses.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local top = os.tmpname()
os.remove(top)
local n_folders = 0

local function folder()
  n_folders = n_folders + 1
  return top .. "/" .. n_folders
end

-- n images of 4 x 4 whose class is where they are bright, out of 3.
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

local function learn_with(net, optim)
  return function(x, y)
    local loss = lt.cross_entropy(net(x), y)
    loss:backward()
    optim:step()
    return loss
  end
end

-- Settings of a run on some images, and a function for run:step.
local function settings(n, more)
  local net = make_net()
  local sgd = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9})
  local all = {net = net, optim = sgd, train = make_set(n), epochs = 2, batch = 8, out = folder()}
  for key, value in pairs(more or {}) do all[key] = value end
  return all, learn_with(net, sgd)
end

-- The lines of metrics.jsonl of one event.
local function lines(path, event)
  local list = {}
  for line in io.lines(path .. "/metrics.jsonl") do
    if line:find('^{"event":"' .. event .. '"') then list[#list + 1] = line end
  end
  return list
end

local function field(line, name) return tonumber(line:match('"' .. name .. '":(-?[%d.e+-]+)')) end

T.test("lt.fit learns", function()
  local net, out = make_net(), folder()
  local train, test = make_set(90), make_set(31)
  local result = lt.fit{net = net, train = train, test = test, epochs = 10, batch = 16, out = out,
                        optim = lt.optim.adam(net, {lr = 0.02}), schedule = lt.schedule.cosine{}}
  assert(result.top1 > 0.9, result.top1)
  assert(result.loss < 0.4 and result.train_loss < 0.4)
  local steps, epochs, ends = lines(out, "step"), lines(out, "epoch"), lines(out, "end")
  T.equal({#steps, #epochs, #ends}, {60, 10, 1})
  T.equal(field(ends[1], "top1"), result.top1)
  T.equal(field(ends[1], "exit"), 0)
  T.equal(ends[1]:match '"weights_sha256":"(%x+)"', net:sha256())
  local copy = make_net():load(out .. "/weights.safetensors")
  T.equal(copy:sha256(), net:sha256())
  assert(io.open(out .. "/curves.svg"):read "a":find "^<svg")
end)

T.test("the lines of a run", function()
  local o, learn = settings(20, {schedule = function(epoch, epochs) return epoch / epochs end})
  local run <close> = lt.run(o)
  local seen, sums = {}, {0.0, 0.0}
  for epoch in run:epochs() do
    for x, y in run:batches() do
      local loss = run:step(learn, x, y)
      seen[#seen + 1] = {epoch, x:dim(1)}
      sums[epoch] = sums[epoch] + loss * x:dim(1)
    end
    run:report{top1 = 0.5, loss = 0.25, other = 7}
  end
  T.equal(seen, {{1, 8}, {1, 8}, {1, 4}, {2, 8}, {2, 8}, {2, 4}})
  T.equal(run.result, {top1 = 0.5, loss = 0.25, other = 7, train_loss = sums[2] / 20})

  local samples = {8, 16, 20, 28, 36, 40}
  for i, line in ipairs(lines(o.out, "step")) do
    T.equal(field(line, "step"), i)
    T.equal(field(line, "epoch"), (i + 2) // 3)
    T.equal(field(line, "samples"), samples[i])
    local middle = (samples[i] + (samples[i - 1] or 0)) / 2
    T.near(field(line, "lr"), 0.1 * middle / 40, 1e-12)
    local sum = 0.0
    for _, name in ipairs{"data", "forward", "backward", "exposed_comm", "optimizer", "other"} do
      local part = field(line, name)
      assert(part >= 0 and part <= 1, line)
      sum = sum + part
    end
    T.near(sum, 1, 5e-4)                           -- they are written with four digits
    assert(field(line, "samples_per_s") > 0)
  end
  for epoch, line in ipairs(lines(o.out, "epoch")) do
    T.near(field(line, "loss"), sums[epoch] / 20, 1e-12)
    T.equal({field(line, "top1"), field(line, "test_loss"), field(line, "other")}, {0.5, 0.25, 7})
  end
end)

T.test("each sample comes once an epoch, in the order of the loader", function()
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

T.test("evaluation counts every sample once", function()
  local net = make_net(0.5)                        -- in train mode it gives other values
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
  assert(net.training)
  T.fails(function() run:evaluate(5) end,
          "run.evaluate: 'set' wants a set of lt.data, it is 5")
  T.fails(function() run:evaluate(test, {batches = 5}) end,
          "run.evaluate: unknown key 'batches' (did you mean 'batch'?)")
end)

T.test("what is not reported is reported when the next epoch is asked for", function()
  local o, learn = settings(8)
  local run <close> = lt.run(o)
  for _ in run:epochs() do
    for x, y in run:batches() do run:step(learn, x, y) end
  end
  T.equal(#lines(o.out, "epoch"), 2)
  assert(run.result.train_loss and not run.result.top1)
end)

T.test("a run that is left early is complete", function()
  local o, learn = settings(8, {epochs = 9})
  do
    local run <close> = lt.run(o)
    for epoch in run:epochs() do
      for x, y in run:batches() do run:step(learn, x, y) end
      run:report()
      if epoch == 3 then break end
    end
  end
  T.equal(field(lines(o.out, "end")[1], "exit"), 0)
  assert(io.open(o.out .. "/weights.safetensors"))
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
          ("the loss is nan at step %d; look at the learning rate and at the data")
          :format(lt.steps() + 1))
  local exits = {}
  for i, line in ipairs(lines(o.out, "end")) do
    exits[i] = field(line, "exit")
    assert(not line:find "top1", "nothing was reported")
  end
  T.equal(exits, {1, 1, 6})
end)

T.test("calls in the wrong order are sentences", function()
  local o, learn = settings(16)
  local run <close> = lt.run(o)
  T.fails(function() run:batches() end,
          "run:batches: it belongs into: for epoch in run:epochs() do ... end, before the report")
  T.fails(function() run:step(learn) end,
          "run:step: it belongs into: for x, y in run:batches() do ... end")
  T.fails(function() run:report() end,
          "run:report: it belongs into: for epoch in run:epochs() do ... end")
  local next_epoch = run:epochs()
  next_epoch()
  T.fails(function() run:epochs() end,
          "run:epochs: it was called before, and a run is one loop")
  T.fails(function() run:step(learn) end, "run:step: each batch of run:batches has one step")
  T.fails(function() run:report() end, "run:report: the epoch had no steps: "
                                       .. "for x, y in run:batches() do run:step(...) end")
  local left = run:batches()
  run:step(learn, left())
  for x, y in run:batches() do                   -- the rest of the epoch
    T.fails(function() left() end, "run:batches: another loop over the batches was begun")
    run:step(function() return learn(x, y) end)
    break
  end
  for x, y in run:batches() do
    run:step(learn, x, y)
    T.fails(function() run:step(learn, x, y) end,
            "run:step: each batch of run:batches has one step")
  end
  run:report()
  T.fails(function() run:report() end, "run:report: this epoch was reported already")
  next_epoch()
  T.fails(function()
    for _ in run:batches() do end
  end, "run:batches: the batch before had no run:step")
  for x, y in run:batches() do
    T.fails(function() run:step(function() return 1 end) end,
            "run:step: the function took no step of the optimizer; "
            .. "lt.pieces adds up parts of a batch")
    T.fails(function() run:step(function() end) end,
            "run:step: the function wants to return the loss, one number; it returned a nil")
    T.fails(function() run:step(5) end, "lt.step wants a function, it is 5")
    run:step(learn, x, y)
  end
  T.fails(function() run:report{top1 = "good"} end,
          "run:report wants numbers by name, top1 is a string")
  T.equal(next_epoch(), nil)
  T.fails(function() run:evaluate(o.train) end, "run:evaluate: this run is over")
  T.fails(function() run:report() end, "run:report: this run is over")
  T.fails(function() return run.batchs end, "a run has no 'batchs' (did you mean 'batches'?)")
  T.fails(function() run.lr = 5 end, "a run has no 'lr' to be set")
end)

T.test("settings are checked before anything is made", function()
  local usage = "lt.run{net, optim, train, epochs, batch; schedule?, augment?, workers?, out?, "
                .. "resume?, save_every?, max_steps?}"
  local function refused(change, message)
    local o = settings(10, change)
    T.fails(function() lt.run(o) end, message)
    assert(not io.open(o.out), "there is a folder")
  end
  refused({net = false}, "lt.run: 'net' wants a net, it is false")
  refused({optim = {}}, "lt.run: 'optim' wants an optimizer of lt.optim, it is a table")
  refused({train = 5}, "lt.run: 'train' wants a set of lt.data, it is 5")
  refused({schedule = 5}, "lt.run: 'schedule' wants a function, it is 5")
  refused({epoch = 5}, "lt.run: unknown key 'epoch' (did you mean 'epochs'?)")
  refused({augment = true}, "lt.run: 'augment' wants a table of options, or false, it is true")
  refused({augment = {flips = true}}, "augment: unknown key 'flips' (did you mean 'flip'?)")
  refused({batch = 11}, "lt.run: batch wants at most the 10 images of the training set, it is 11")
  T.fails(function() lt.run{} end, "lt.run: 'net' must be given: " .. usage)
  T.fails(function() lt.fit{lr = 5} end, "lt.fit: unknown key 'lr'" .. select(2, pcall(lt.fit, {}))
                                         :match "given(: .*)$")
end)

T.test("a run that waits for its data says why", function()
  local waits = require "luatrain.waits"
  local function warning_of(waited, stats)
    local w, text = waits.new(), nil
    for step = 1, 200 do
      local said = w:step(waited, 0.125, 32, {stats = function() return stats end})
      if said then
        assert(not text, "it is said once")
        text = said
        T.equal(step, 50)
      end
    end
    return text
  end
  local stats = {wait_s = 5.0, work_s = 8.0, images = 4000, workers = 1}
  T.equal(warning_of(0.01, stats), nil)
  T.equal(warning_of(0.0625, {work_s = 0.0, images = 0, workers = 0}):match "(.*){",
          "50 % of the last 50 steps was waiting for data. No worker makes it ahead: lt.run")
  local text = warning_of(0.0625, stats)
  assert(text:find("Making an image takes 2.00 ms, 1 worker makes 500 images a second, "
                   .. "the net could take 512. ", 1, true), text)
end)

-- ==== Pieces =====================================================================================

-- The gradients of a batch in k pieces, as one list.
local function gradients(net, k, x, y)
  net:zero_grad()
  local loss = 0.0
  for x_i, y_i, share in lt.pieces(k, x, y) do
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

T.test("pieces of a batch are the batch", function()
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
  for x, y, share in lt.pieces(4, set.images, set.labels) do
    T.equal(#x, #y)
    sizes[#sizes + 1], shares = #x, shares + share
  end
  T.equal(sizes, {3, 3, 3, 1})
  T.near(shares, 1, 1e-12)
  net:zero_grad()
end)

-- lt.fit with a batch of 32 in pieces: its weights as one list.
local function fitted(accumulate)
  lt.seed(5)
  local net = make_net()
  for i, p in ipairs(net:parameters()) do p:copy(lt.randn(p.shape) * (0.1 * i)) end
  lt.fit{net = net, train = make_set(70), test = make_set(5), epochs = 2, batch = 32,
         accumulate = accumulate, optim = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9}),
         smoothing = 0.1, out = folder()}
  local list = {}
  for _, p in ipairs(net:parameters()) do
    for _, value in ipairs(p:reshape({p:count()}):totable()) do list[#list + 1] = value end
  end
  return list
end

T.test("lt.fit in pieces takes the same steps", function()
  local whole, parts = fitted(1), fitted(4)
  for i, value in ipairs(whole) do T.near(parts[i], value, 1e-6) end
end)

os.execute("rm -rf " .. top)
T.finish()
