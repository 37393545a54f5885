-- test_phases.lua - runs whose image size changes between epochs.
local lt = require "luatrain"
local nn = lt.nn
local phases = require "luatrain.train.phases"
local T = require "lt_test"

local START = lt.randn{2, 3, 3, 3}

-- Settings of a run on 20 images of 8 x 8, with 10 test images. The net records its inputs.
local function settings(sizes, more)
  local train, test = lt.data.open "synthetic:8x8x3/2/20"
  local seen = {}
  local net = nn.module({conv = nn.conv2d{3, 2, 3, pad = 1}}, function(self, x)
    seen[#seen + 1] = ("%s%dx%dx%d"):format(self.training and "" or "test ", x:dim(1), x:dim(2),
                                            x:dim(3))
    return lt.global_avg_pool2d(self.conv(x))
  end)
  net:parameters()                            -- allocates them
  net.conv.w:copy(START)
  net.conv.b:fill(0)
  local o = {net = net, optim = lt.optim.sgd(net, {lr = 0.1}), train = train, epochs = 4,
             batch = 10, out = T.folder() .. "/out", sizes = sizes}
  for key, value in pairs(more or {}) do o[key] = value end
  return o, seen, test
end

local SIZES = {{epochs = 1, size = 4}, {epochs = 2, size = 8, batch = 20}, {size = 12, batch = 7}}

T.test("sizes and batches change between epochs", function()
  local o, seen, test = settings(SIZES, {eval_batch = 20})
  o.test = test
  lt.fit(o)
  T.equal(seen, {"10x4x4", "10x4x4", "test 2x4x4", "20x8x8", "test 2x8x8", "20x8x8", "test 2x8x8",
                 "7x12x12", "7x12x12", "6x12x12", "test 2x12x12"})
  local steps, sizes = T.events(o.out, "step"), T.events(o.out, "epoch")
  for i, step in ipairs(steps) do steps[i] = step.samples end
  for i, epoch in ipairs(sizes) do sizes[i] = epoch.size end
  T.equal({T.events(o.out, "start")[1].steps, steps, sizes},
          {7, {10, 20, 40, 60, 67, 74, 80}, {4, 8, 8, 12}})
end)

T.test("a run that is stopped in a phase resumes in it", function()
  local function train(out, max_steps)
    local o, _, test = settings(SIZES, {out = out, max_steps = max_steps})
    o.test = test
    local ok, why = pcall(lt.fit, o)
    assert(ok == not max_steps and (ok or why:find "stopped by max_steps"), why)
    return o.net:sha256()
  end
  local whole, out = train(T.folder() .. "/out"), T.folder() .. "/out"
  for step = 1, 7 do train(out, step) end
  T.equal(train(out), whole)
end)

T.test("the minimum crop area of a phase", function()
  local function first(area)
    local o = settings({{size = 8, area = area}}, {augment = {area = 0.05}})
    local run <close> = lt.run(o)
    for _ in run:epochs() do
      for x in run:batches() do return x:totable() end
    end
  end
  T.equal(first(nil), first(0.05))
  local x = (select(1, lt.data.open "synthetic:8x8x3/2/20")):open_batches{
    batch = 10, shuffle = true, epoch = 1}:next()
  T.equal(first(1.0), x:totable())
  assert(first(nil)[1][1][1][1] ~= first(1.0)[1][1][1][1])
end)

T.test("evaluation uses the image size of the epoch, also after its report", function()
  local o, seen, test = settings(SIZES)
  local run <close> = lt.run(o)
  for epoch in run:epochs() do
    for x, y in run:batches() do run:step(T.learn(o.net, o.optim), x, y) end
    run:report(run:evaluate(test))
    T.equal(seen[#seen], ("test 2x%dx%d"):format(run.phase.size, run.phase.size))
    run:evaluate(test)
    T.equal(seen[#seen], seen[#seen - 1])
    if epoch == 2 then break end
  end
end)

T.test("invalid sizes", function()
  local function refused(sizes, message)
    local o = settings(sizes)
    T.fails(function() lt.run(o) end, message)
    assert(not io.open(o.out), "it made a folder")
  end
  refused({{size = 4}, {size = 8}},
          "lt.run: item 1 of sizes has no epochs; only the last item may omit them")
  refused({{epochs = 1, size = 4}, {epochs = 7, size = 8}},
          "lt.run: the epochs of sizes sum to 8, but those of the run are 4")
  refused({{epochs = 1}}, "sizes: 'size' is missing: sizes{size, epochs?, batch?, area?}")
  refused({{size = 4, batch = 21}},
          "lt.run: batch must be at most the 20 images of the training set, but is 21")
  refused({4, 8}, "lt.run: 'sizes' must be a list of tables, but item 1 is 4")
  refused({{size = 4, area = 2}}, "sizes: 'area' must be a number from 0 to 1, but is 2")
  refused({}, "lt.run: sizes is empty")
  local o = settings({{size = 4}})
  o.train = lt.data.set{images = lt.zeros{20, 8, 8, 3}, labels = lt.zeros({20}, {dtype = "u8"})}
  T.fails(function() lt.run(o) end, "data: only u8 images can be resized, to 1x1 to 16384x16384; "
          .. "these are f32, and the size is 4x4")
  assert(not io.open(o.out), "it made a folder")
end)

-- Counts the steps epoch by epoch.
local function counted(list, epoch, done, epochs, images)
  local steps = 0
  for e = epoch, epochs do
    local batch = phases.at(list, e).batch
    steps = steps + (images - done + batch - 1) // batch
    done = 0
  end
  return steps
end

T.test("the number of steps", function()
  local list = {{batch = 3, last = 2}, {batch = 10, last = 2}, {batch = 4, last = 7},
                {batch = 1, last = math.huge}}
  for epoch = 1, 9 do
    for epochs = 0, 9 do
      for _, done in ipairs{0, 1, 9, 10} do
        T.equal(phases.steps(list, epoch, done, epochs, 10),
                counted(list, epoch, done, epochs, 10))
      end
    end
  end
end)

-- Calls fn, which fails after a million instructions: a loop over the epochs would take hours.
local function in_time(fn, ...)
  debug.sethook(function() error "it loops over the epochs" end, "", 1000000)
  local _ <close> = setmetatable({}, {__close = function() debug.sethook() end})
  return fn(...)
end

T.test("the number of steps of a huge number of epochs", function()
  local one = {{batch = 16, last = math.huge}}
  T.equal(in_time(phases.steps, one, 1, 0, 100000000, 48), 300000000)
  T.equal(in_time(phases.steps, one, 5, 20, 100000000, 48), 300000000 - 13)
  T.equal(in_time(phases.steps, one, 1, 0, math.maxinteger, 48), 1 << 53)
  local o, _, test = settings(nil, {epochs = math.maxinteger, max_steps = 2})
  o.test = test
  local _, why = in_time(pcall, lt.fit, o)
  assert(tostring(why):find "stopped by max_steps at step 2", why)
  o = settings(nil, {epochs = math.maxinteger, max_steps = 3, out = o.out, test = test})
  _, why = in_time(pcall, lt.fit, o)
  assert(tostring(why):find "stopped by max_steps at step 3", why)
end)

T.finish()
