-- test_determinism.lua - the same seed gives the same bits; looking on, stopping and going on
-- change nothing, and pieces give what the whole gives.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

-- The sha256 of a small net with all that is random in it, after a few steps. observe(net, x) may
-- look on.
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

-- The looks that a script may take at a run.
local looks = {
  after_the_step = function(net, x) net(x) end,
  without_gradients = function(net, x) lt.no_grad(function() net(x) end) end,
  in_micro_batches = function(net, x, y) for part in lt.micro_batches(2, x, y) do net(part) end end,
  broken_off = function(net, x, y)
    for part, _, share in lt.micro_batches(4, x, y) do
      net(part)
      if share < 1 then break end
    end
  end,
  nothing = function() end,
}

-- A run of six steps whose dropout comes where no gradient goes; it learns from itself, too. Prints
-- the digest of the net and the weights that learn.
local function train_frozen(inside, between, micro_batches)
  local train = lt.data.open "synthetic:4x4x1/3/60"
  local body = nn.sequential{nn.flatten(), nn.linear{16, 8}, nn.relu()}
  local net = nn.sequential{nn.dropout{0.2}, body, nn.dropout{0.5}, nn.linear{8, 3}}
  body:freeze()
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  local function go(x, y, share)
    local logits = net(x)
    local teacher = lt.no_grad(function() return net(x):softmax() end)
    local apart = logits:softmax() - teacher
    local loss = (lt.cross_entropy(logits, y) + (apart * apart):mean()) * share
    loss:backward()
    return loss:item()
  end
  local function learn(x, y)
    local sum = 0.0
    if micro_batches == 1 then
      sum = go(x, y, 1.0)
    else
      for part, labels, share in lt.micro_batches(micro_batches, x, y) do sum = sum + go(part,
          labels, share) end
    end
    sgd:step()
    looks[inside](net, x, y)
    return sum
  end
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = 20}
  for _ in run:epochs() do
    for x, y in run:batches() do
      run:step(learn, x, y)
      lt.step(looks[between], net, x, y)
    end
  end
  print(net:sha256())
  for i = 1, 3 do print(table.concat(net[4].w:totable()[i], " ")) end
end

if arg[1] == "frozen" then
  train_frozen(arg[2], arg[3], tonumber(arg[4]))
  os.exit(0, true)
end

-- A net's initial values depend on its number in this process too, and dropout on the count of
-- steps: so each run is a program of its own.
if arg[1] then
  print(train(tonumber(arg[2]), ({
    evaluation = function(net, x)
      net:eval()
      lt.step(lt.no_grad, function() net(x):softmax():mean():item() end)
      net:train()
    end,
    forward = function(_, x)
      lt.step(lt.no_grad, function() lt.dropout(x, 0.5):sum():item() end)
    end,
    nothing = false,
  })[arg[1]]))
  os.exit(0, true)
end

local function run(what, seed)
  local pipe = assert(io.popen(("%s %s %s %d"):format(T.program(), arg[0], what, seed)))
  local sha = pipe:read "l"
  assert(pipe:close() and #sha == 64)
  return sha
end

T.test("same seed, same bits", function()
  T.equal(run("nothing", 1), run("nothing", 1))
  assert(run("nothing", 1) ~= run("nothing", 2))
end)

T.test("an extra evaluation changes nothing", function()
  T.equal(run("evaluation", 1), run("nothing", 1))
end)
T.test("an extra random call without gradients changes nothing", function()
  T.equal(run("forward", 1), run("nothing", 1))
end)

local folder = T.folder()

local function command(inside, between, micro_batches, options)
  return ("%s --quiet --threads 1 --out %s %s %s frozen %s %s %d"):format(
    T.program(), folder, options or "--resume never", arg[0], inside, between, micro_batches)
end

-- What train_frozen prints: a digest, and a list of numbers.
local function frozen(...)
  local pipe = assert(io.popen(command(...)))
  local sha, numbers = pipe:read "l", {}
  for value in pipe:read "a":gmatch "%S+" do numbers[#numbers + 1] = tonumber(value) end
  assert(pipe:close() and #sha == 64)
  return sha, numbers
end
local sha, weights = frozen("nothing", "nothing", 1)

T.test("a run that is stopped goes on with the same draws", function()
  assert(os.execute(command("nothing", "nothing", 1, "--resume never --max-steps 4 2>/dev/null")))
  T.equal(frozen("nothing", "nothing", 1, "--resume auto"), sha)
end)

T.test("micro-batches of a batch draw what the whole does, trained or not", function()
  local _, of_micro_batches = frozen("nothing", "nothing", 3)
  T.equal(#of_micro_batches, 24)
  for i, value in ipairs(of_micro_batches) do T.near(value, weights[i], 1e-5) end
end)

for look in pairs(looks) do
  T.test(("a look at a run, %s"):format(look), function()
    T.equal(frozen(look, "nothing", 1), sha)
    T.equal(frozen("nothing", look, 1), sha)
  end)
end


T.test("looking at a net in mid-step changes nothing", function()
  local function running(look)
    lt.seed(1)
    local net = nn.sequential{nn.batch_norm{2}}
    local o = lt.optim.sgd(net, {lr = 0.1})
    local a, b = lt.randn({6, 2}), lt.randn({4, 2})
    net(a):sum():backward()
    look(net)
    net(b):sum():backward()
    o:step()
    return net[1].mean:totable()[1], net[1].var:totable()[1]
  end
  local mean, var = running(function() end)
  for _, look in ipairs{function(net) net:eval():train() end, function(net) net:sha256() end} do
    local m, v = running(look)
    T.equal(m, mean)
    T.equal(v, var)
  end
end)

T.finish()
