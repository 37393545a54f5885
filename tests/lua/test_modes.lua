-- test_modes.lua - training and eval mode in runs: a run does not change the mode of a module.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

-- Settings of a run whose body is frozen and in eval mode, and the body.
local function frozen_settings()
  local body = nn.sequential{nn.conv2d{1, 4, 3}, nn.batch_norm{4}, nn.dropout{0.5}}
  local net = nn.sequential{body, nn.flatten(), nn.linear{16, 3}}
  body:freeze():eval()
  return {net = net, optim = lt.optim.sgd(net, {lr = 0.1}), epochs = 2, batch = 8,
          train = lt.data.open "synthetic:4x4x1/3/16", out = T.folder() .. "/out"}, body
end

local function train(o)
  local learn = T.learn(o.net, o.optim)
  local run <close> = lt.run(o)
  for _ in run:epochs() do
    for x, y in run:batches() do run:step(learn, x, y) end
    run:report(run:evaluate(o.train))
  end
end

local function expect_frozen(net, body)
  T.equal({net.training, body.training, body[2].training, body[3].training, net[3].training},
          {true, false, false, false, true})
  T.equal({body[2].mean:sum():item(), body[2].var:sum():item()}, {0.0, 4.0})
end

T.test("a run and lt.fit do not change the mode of a module", function()
  local o, body = frozen_settings()
  train(o)
  expect_frozen(o.net, body)
  T.equal(#T.warnings(o.out), 0)
  o, body = frozen_settings()
  o.test = o.train
  lt.fit(o)
  expect_frozen(o.net, body)
end)

T.test("a run warns once about a net in eval mode, unless a module of it trains", function()
  for head, count in pairs{eval = 1, train = 0} do
    local o = frozen_settings()
    o.net:eval()
    o.net[3][head](o.net[3])
    train(o)
    local list = T.warnings(o.out)
    T.equal(#list, count)
    assert(not list[1] or list[1]:find("the net is in eval mode, so dropout does nothing and "
      .. "batch norm uses its running statistics; call net:train() before the loop over "
      .. "run:batches()", 1, true), list[1])
    T.equal(o.net.training, false)
  end
end)

T.finish()
