-- test_memory.lua - resident size stays flat over many steps of LeNet, with and without lt.step.
local lt = require "luatrain"
local T = require "lt_test"

local slow = os.getenv "LUATRAIN_TEST_SLOW" == "1"
local STEPS, BATCH = slow and 10000 or 600, slow and 8 or 4

-- Bytes of this process in memory.
local function resident()
  local file = assert(io.open "/proc/self/statm")
  local pages = select(2, file:read("n", "n"))
  file:close()
  return pages * 4096
end

local function flat(run)
  local net = lt.models.lenet{}
  local sgd = lt.optim.sgd(net, {lr = 0.01, momentum = 0.9})
  local y = lt.tensor({0, 1, 2, 3, 4, 5, 6, 7}, {dtype = "i64"}):slice(1, 1, BATCH)
  local early
  for i = 1, STEPS do
    local x = lt.randn({BATCH, 28, 28, 1})
    run(function()
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      sgd:step()
      return loss
    end)
    if i == STEPS // 2 then early = resident() end
  end
  local growth = resident() - early
  assert(growth < 24 << 20, ("grew by %d bytes in the second half"):format(growth))
end

T.test(STEPS .. " steps with lt.step", function() flat(lt.step) end)
T.test(STEPS .. " steps without", function() flat(function(step) return step() end) end)
T.test("garbage outside a step is bounded", function()
  collectgarbage()
  local before = lt.memory().live
  for _ = 1, 2000 do lt.zeros({256, 1024}) end        -- 1 MiB each
  assert(lt.memory().live - before < 300 << 20, lt.memory().live - before)
end)

T.finish()
