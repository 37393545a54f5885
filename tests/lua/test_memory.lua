-- test_memory.lua - resident memory does not grow over many steps of LeNet, with and without
-- lt.step; limits on garbage.
local lt = require "luatrain"
local T = require "lt_test"

local slow = os.getenv "LUATRAIN_TEST_SLOW" == "1"
local STEPS, BATCH = slow and 10000 or 600, slow and 8 or 4

-- Returns the resident memory of this process, in bytes.
local function resident()
  local file = assert(io.open "/proc/self/statm")
  local pages = select(2, file:read("n", "n"))
  file:close()
  return pages * 4096
end

-- Checks that memory does not grow in the second half of STEPS steps. run(fn) calls fn in a step.
local function check_growth(run)
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

T.test(STEPS .. " steps with lt.step", function() check_growth(lt.step) end)
T.test(STEPS .. " steps without lt.step", function()
  check_growth(function(step) return step() end)
end)

T.test("a smaller batch reuses the memory of a larger one", function()
  local net = lt.models.lenet{}
  local function step(batch)
    local x, y = lt.randn({batch, 28, 28, 1}), lt.zeros({batch}, {dtype = "i64"})
    lt.step(function() lt.cross_entropy(net(x), y):backward() end)
    local memory = lt.memory()
    return memory.live + memory.cached
  end
  step(128)
  local used = step(128)
  for _, batch in ipairs{80, 128, 33, 100, 128} do
    local more = step(batch) - used
    assert(more < 1 << 20, more)
  end
end)

-- Makes 2000 tensors of 1 MiB and drops them. Returns the bytes that are still alive.
local function make_garbage()
  collectgarbage()
  local before = lt.memory().live
  for _ = 1, 2000 do lt.zeros({256, 1024}) end
  return lt.memory().live - before
end

T.test("garbage outside a step is bounded", function()
  local bytes = make_garbage()
  assert(bytes < 150 << 20, bytes)
end)
T.test("garbage within a step is bounded", function()
  local bytes = lt.step(make_garbage)
  assert(bytes < 150 << 20, bytes)
end)

-- The handles of the activations still exist, because no garbage collection runs before backward.
T.test("backward frees the activations that it has used", function()
  local w = lt.ones({1024, 1024}):requires_grad()       -- 4 MiB
  local before = lt.memory().live
  local made, left
  w:on_grad(function() left = lt.memory().live - before end)
  lt.step(function()
    local function forward()
      local y = w
      for _ = 1, 48 do y = lt.sigmoid(y) end
      return y:sum()
    end
    local loss = forward()
    made = lt.memory().live - before
    loss:backward()
  end)
  assert(made >= 192 << 20, made)
  assert(left < 20 << 20, left)
end)

T.finish()
