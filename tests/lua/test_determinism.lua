-- test_determinism.lua - the same seed gives the same bits, and looking on changes nothing.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

-- The sha256 of a small net with all that is random in it, after a few steps. watch(net, x) may
-- look on.
local function train(seed, watch)
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
    if watch then watch(net, x) end
  end
  return net:sha256()
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
