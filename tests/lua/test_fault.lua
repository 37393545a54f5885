-- test_fault.lua - if any allocation fails, a script ends with exit code 7 and a message, or
-- continues without the memory.
local T = require "lt_test"

if arg[1] then
  local lt = require "luatrain"
  local nn = lt.nn
  local net = nn.sequential{
    nn.conv2d{1, 2, 3}, nn.batch_norm{2}, nn.relu(), nn.flatten(), nn.linear{8, 2}}
  local o = lt.optim.adam(net, {lr = 0.1})
  net[1].w:on_grad(function(g) return g * 2 end)
  for _ = 1, 2 do
    lt.step(function()
      local y = lt.tensor({0, 1}, {dtype = "i64"})
      lt.cross_entropy(net(lt.randn({2, 4, 4, 1})) * 1, y):backward()
      o:step()
    end)
  end
  lt.save(arg[1], net)
  net:load(arg[1])
  os.exit(0, true)
end

T.test("any allocation may fail", function()
  local path = os.tmpname()
  local n, text, code = 0
  repeat
    n = n + 1
    text, code = T.run(".", ("--threads 1 %s %s"):format(arg[0], path),
                       "LUATRAIN_FAULT=alloc:n=" .. n)
    if code ~= 0 and (code ~= 7 or not text:find("out of memory", 1, true)) then
      error(("allocation %d: exit code %d, %s"):format(n, code, text))
    end
  until code == 0
  os.remove(path)
  print(("%d allocations"):format(n - 1))
  assert(n > 100, "the script allocates")
end)

T.finish()
