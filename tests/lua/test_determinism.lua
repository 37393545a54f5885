-- test_determinism.lua - the same seed gives the same bits. Extra forward passes, stopping and
-- resuming do not change a run, and micro-batches draw the random numbers of the whole batch.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

-- Trains a small net that uses random numbers for a few steps, and calls observe(net, x) after each
-- step, if given. Returns the sha256 of the net.
local function train(seed, observe)
  lt.seed(seed)
  local net = nn.sequential{
    nn.conv2d{1, 4, 3, pad = 1}, nn.batch_norm{4}, nn.relu(), nn.flatten(), nn.dropout{0.3},
    nn.linear{4 * 36, 3}}
  local o = lt.optim.adamw(net, {lr = 1e-2})
  for _ = 1, 5 do
    local x = lt.randn({8, 6, 6, 1})
    local y = lt.tensor({0, 1, 2, 0, 2, 1, 1, 0}, {dtype = "i64"})
    lt.step(function()
      lt.cross_entropy(net(x), y):backward()
      o:step()
    end)
    if observe then observe(net, x) end
  end
  return net:sha256()
end

-- Extra forward passes that must not change a run.
local extras = {
  with_gradients = function(net, x) net(x) end,
  without_gradients = function(net, x) lt.no_grad(function() net(x) end) end,
  in_micro_batches = function(net, x, y) for part in lt.micro_batches(2, x, y) do net(part) end end,
  in_one_micro_batch = function(net, x, y)
    for part, _, share in lt.micro_batches(4, x, y) do
      net(part)
      if share < 1 then break end
    end
  end,
  nothing = function() end,
}

-- A run of six steps. Dropout runs where no gradient flows, and the loss compares the net with a
-- second pass of itself. extras[inside] is called in each step, extras[between] after it. Prints
-- the digest of the net and the weights that are trained.
local function train_frozen(inside, between, micro_batches)
  local train = lt.data.open "synthetic:4x4x1/3/60"
  local body = nn.sequential{nn.flatten(), nn.linear{16, 8}, nn.relu()}
  local net = nn.sequential{nn.dropout{0.2}, body, nn.dropout{0.5}, nn.linear{8, 3}}
  body:freeze()
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  local function backward(x, y, share)
    local logits = net(x)
    local teacher = lt.no_grad(function() return net(x):softmax() end)
    local diff = logits:softmax() - teacher
    local loss = (lt.cross_entropy(logits, y) + (diff * diff):mean()) * share
    loss:backward()
    return loss:item()
  end
  local function train_step(x, y)
    local sum = 0.0
    if micro_batches == 1 then
      sum = backward(x, y, 1.0)
    else
      for part, labels, share in lt.micro_batches(micro_batches, x, y) do
        sum = sum + backward(part, labels, share)
      end
    end
    sgd:step()
    extras[inside](net, x, y)
    return sum
  end
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = 20}
  for _ in run:epochs() do
    for x, y in run:batches() do
      run:step(train_step, x, y)
      lt.step(extras[between], net, x, y)
    end
  end
  print(net:sha256())
  for i = 1, 3 do print(table.concat(net[4].w:totable()[i], " ")) end
end

if arg[1] == "frozen" then
  train_frozen(arg[2], arg[3], tonumber(arg[4]))
  os.exit(0, true)
end

T.test("after lt.seed, nets and random numbers repeat", function()
  local function draw(seed)
    lt.seed(seed)
    local first, second = lt.nn.linear{3, 2}, lt.nn.linear{3, 2}
    return {first:sha256(), second:sha256(), lt.randn({1}):item()}
  end
  local before, one = lt.seed(), draw(5)
  T.equal(draw(5), one)
  local other = draw(6)
  assert(other[1] ~= one[1] and one[1] ~= one[2])
  lt.seed(before)
end)

T.test("with --seed, lt.seed keeps that seed, and random numbers repeat", function()
  local folder = T.folder [[
    local lt = require "luatrain"
    for i = 5, 7 do print(lt.seed(i), lt.randn{1}:item()) end]]
  local lines = {}
  for line in T.run(folder, "--seed 3 t.lua"):gmatch "[^\n]+" do lines[#lines + 1] = line end
  T.equal(lines, {lines[1], lines[1], lines[1]})
  assert(lines[1]:find "^3\t", lines[1])
end)

T.test("same seed, same bits", function()
  T.equal(train(1), train(1))
  assert(train(1) ~= train(2))
end)

T.test("an extra evaluation changes nothing", function()
  T.equal(train(1, function(net, x)
    net:eval()
    lt.step(lt.no_grad, function() net(x):softmax():mean():item() end)
    net:train()
  end), train(1))
end)

T.test("an extra random call without gradients changes nothing", function()
  T.equal(train(1, function(_, x)
    lt.step(lt.no_grad, function() lt.dropout(x, 0.5):sum():item() end)
  end), train(1))
end)

T.test("after lt.seed, dropout and mixup repeat within a step", function()
  local x, y = lt.ones{4, 8}, lt.tensor({0, 1, 2, 0}, {dtype = "i64"})
  local function draw()
    lt.seed(5)
    return {lt.dropout(x, 0.5):totable(), (select(3, lt.mixup(x, y, 1.0))),
            lt.no_grad(lt.dropout, x, 0.5):totable()}
  end
  T.equal(draw(), draw())
end)

T.test("backward draws the mask of its forward pass, also after lt.seed", function()
  local x = lt.ones{64}:requires_grad()
  lt.seed(5)
  local out = lt.dropout(x, 0.5)
  lt.seed(6)
  out:sum():backward()
  T.equal(x.grad:totable(), out:totable())
end)

-- Trains one net, then another in two runs. The second run may be stopped and resumed.
local repeated = [[
local lt = require "luatrain"
local nn = lt.nn
local data = lt.data.open "synthetic:4x4x1/3/64"
local function learn(net, optim, x, y)
  local mixed, others, kept = lt.mixup(x, y, 0.5)
  local z = net(mixed)
  local loss = lt.cross_entropy(z, y) * kept + lt.cross_entropy(z, others) * (1 - kept)
  loss:backward()
  optim:step()
  return loss
end
local function train(with_run)
  lt.seed(5)
  local net = nn.sequential{nn.flatten(), nn.dropout{0.2}, nn.linear{16, 8}, nn.relu(),
                            nn.dropout{0.5}, nn.linear{8, 3}}
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  if with_run then
    local run <close> = lt.run{net = net, optim = sgd, train = data, epochs = 2, batch = 16}
    for _ in run:epochs() do
      for x, y in run:batches() do run:step(learn, net, sgd, x, y) end
    end
  else
    for x, y in data:batches{batch = 16, shuffle = true} do lt.step(learn, net, sgd, x, y) end
  end
  return net:sha256()
end
if arg[1] then train(false) end
print(train(arg[1]), train(arg[1]))
]]

T.test("after lt.seed, training repeats in every mode", function()
  local folder = T.folder(repeated)
  for _, mode in ipairs{"", "--ranks 2", "--deterministic --vranks 2",
                        "--ranks 2 --parallel pipe=2,micro=2", "--ranks 1 --parallel async=asgd",
                        "--parallel async=asgd --simulate workers=2,delay=lognormal:0.5"} do
    for _, run in ipairs{"", "run"} do
      local out, code = T.run(folder, ("--resume never --quiet %s t.lua %s"):format(mode, run))
      local first, second = out:match "(%x+)\t(%x+)\n$"
      T.equal({code, mode, first}, {0, mode, second})
    end
  end
end)

T.test("a run after other training and lt.seed resumes with the same random numbers", function()
  local folder = T.folder(repeated)
  local out = T.run(folder, "--quiet --out whole t.lua run")
  T.equal(select(2, T.run(folder, "--quiet --out part --max-steps 3 t.lua run")), 0)
  T.equal(T.run(folder, "--quiet --out part t.lua run"):match "^(%x+)\t", out:match "^(%x+)\t")
end)

-- Calls lt.seed within a run: a resumed run would draw and shuffle otherwise.
local SEEDS = [[
local lt = require "luatrain"
local nn = lt.nn
local data = lt.data.open "synthetic:4x4x1/3/64"
local net = nn.sequential{nn.flatten(), nn.linear{16, 8}, nn.linear{8, 3}}
local sgd = lt.optim.sgd(net, {lr = 0.1})
do
  local run <close> = lt.run{net = net, optim = sgd, train = data, epochs = 2, batch = 16}
  print(lt.seed(), pcall(lt.seed, 7))
  for _ in run:epochs() do
    for x, y in run:batches() do run:step(function()
      if run.steps == 1 then lt.seed(8) end
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      sgd:step()
      return loss
    end) end
  end
end
]]

T.test("lt.seed within a run is refused in every mode", function()
  local folder = T.folder(SEEDS)
  local refusal = "lt.seed: a run has begun, and would resume with other random numbers; call it "
                  .. "before lt.run"
  for _, mode in ipairs{"", "--ranks 2", "--ranks 2 --parallel pipe=2,micro=2,cut=3",
                        "--ranks 1 --parallel async=asgd"} do
    local out, code = T.run(folder, ("--resume never --quiet --out out %s t.lua"):format(mode))
    assert(out:find("0\tfalse\tt.lua:8: " .. refusal, 1, true), out)
    assert(out:find("t.lua:11: " .. refusal, 1, true), out)
    T.equal({mode, code}, {mode, 1})
  end
end)

local folder = T.folder()

-- Runs train_frozen in a process. Returns the digest and the list of weights that it prints.
local function run_frozen(inside, between, micro_batches, options)
  local words = ("--quiet --threads 1 --out %s %s %s frozen %s %s %d"):format(
    folder, options or "--resume never", arg[0], inside, between, micro_batches)
  local sha, rest = T.ends(".", words, 0, ""):match "^(%x+)\n(.*)$"
  local numbers = {}
  for value in (rest or ""):gmatch "%S+" do numbers[#numbers + 1] = tonumber(value) end
  return sha, numbers
end

local sha, weights = run_frozen("nothing", "nothing", 1)
assert(#sha == 64)

T.test("a resumed run draws the same random numbers", function()
  T.equal(run_frozen("nothing", "nothing", 1, "--resume never --max-steps 4"), nil)
  T.equal(run_frozen("nothing", "nothing", 1, "--resume auto"), sha)
end)

T.test("micro-batches draw the numbers of the whole batch, with or without gradients", function()
  local _, of_micro_batches = run_frozen("nothing", "nothing", 3)
  T.equal(#of_micro_batches, 24)
  for i, value in ipairs(of_micro_batches) do T.near(value, weights[i], 1e-5) end
end)

for extra in pairs(extras) do
  T.test(("an extra forward pass changes nothing: %s"):format(extra), function()
    T.equal(run_frozen(extra, "nothing", 1), sha)
    T.equal(run_frozen("nothing", extra, 1), sha)
  end)
end

T.test("eval and sha256 within a step do not change running statistics", function()
  local function statistics(inspect)
    lt.seed(1)
    local net = nn.sequential{nn.batch_norm{2}}
    local o = lt.optim.sgd(net, {lr = 0.1})
    local a, b = lt.randn({6, 2}), lt.randn({4, 2})
    net(a):sum():backward()
    inspect(net)
    net(b):sum():backward()
    o:step()
    return net[1].mean:totable()[1], net[1].var:totable()[1]
  end
  local mean, var = statistics(function() end)
  for _, inspect in ipairs{function(net) net:eval():train() end, function(net) net:sha256() end} do
    local m, v = statistics(inspect)
    T.equal(m, mean)
    T.equal(v, var)
  end
end)

T.finish()
