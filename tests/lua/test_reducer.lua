-- test_reducer.lua - two replicas with a reducer train like one net on the joined batch.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"
local reduce = require "reducer"

local path = os.tmpname()
local function make()
  return nn.sequential{
    nn.conv2d{1, 4, 3, pad = 1}, nn.relu(), nn.flatten(), nn.linear{4 * 6 * 6, 3}}:to("f64")
end

local one = make()
lt.save(path, one)
local replicas = {make():load(path), make():load(path)}
os.remove(path)
reduce(replicas)

local images = lt.randn({8, 6, 6, 1}, {dtype = "f64"})
local labels = lt.tensor({0, 1, 2, 0, 2, 1, 1, 0}, {dtype = "i64"})
local function loss(net, first, last)
  return lt.cross_entropy(net(images:slice(1, first, last)), labels:slice(1, first, last))
end

T.test("five steps of two replicas equal five steps of one net", function()
  local function sgd(net) return lt.optim.sgd(net, {lr = 0.1, momentum = 0.9}) end
  local o, o1, o2 = sgd(one), sgd(replicas[1]), sgd(replicas[2])
  for _ = 1, 5 do
    lt.step(function()
      loss(one, 1, 8):backward()
      o:step()
      loss(replicas[1], 1, 4):backward()
      loss(replicas[2], 5, 8):backward()
      o1:step()
      o2:step()
    end)
  end
  T.equal(replicas[1]:sha256(), replicas[2]:sha256())
  for name, p in one:named_parameters() do
    for other, q in replicas[1]:named_parameters() do
      if name == other then assert(lt.abs(p - q):max():item() < 1e-12, name) end
    end
  end
end)

T.test("a hook must not drop a gradient that other ranks need", function()
  local out = T.folder [[
    local lt = require "luatrain"
    local net = lt.nn.linear{4, 2}
    local o = lt.optim.sgd(net, {lr = 0.1})
    local before = net:sha256()
    net.w:on_grad(function() net.w:zero_grad() end)
    net.b:on_grad(function() net.b:zero_grad() end)
    net(lt.ones{4, 4}):sum():backward()
    print(o:step(), net:sha256() == before)]]
  T.equal(T.run(out, "--threads 1 t.lua"), "applied\ttrue\n")
  local text, code = T.run(out, "--ranks 2 --threads 1 t.lua")
  assert(text:find("t%.lua:7: .*backward of linear: a hook discarded the gradient"), text)
  T.equal(code, 1)
end)

T.finish()
