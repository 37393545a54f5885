-- test_schedule.lua - schedules: their formulas, both ends, and the end of warm-up.
local lt = require "luatrain"
local schedule = lt.schedule
local T = require "lt_test"

-- Schedules fall from 1, so the tolerance is 1 ulp of 1.
local function within_ulp(got, wanted) T.near(got, wanted, 2.0 ^ -52) end

T.test("constant", function()
  local f = schedule.constant()
  T.equal({f(0, 10), f(3.7, 10), f(10, 10)}, {1, 1, 1})
  f = schedule.constant{warmup = 2}
  T.equal({f(0, 10), f(0.5, 10), f(2, 10), f(9, 10)}, {0.0, 0.25, 1, 1})
end)

-- Checks the factors by epoch of a run of so many epochs.
local function check(f, epochs, factors)
  for epoch, factor in pairs(factors) do T.near(f(epoch, epochs), factor) end
end

T.test("linear", function()
  check(schedule.linear{}, 4, {[0] = 1, 0.75, [4] = 0})
  check(schedule.linear{final = 0.2, warmup = 1}, 5, {[0.25] = 0.25, 1, [3] = 0.6, [5] = 0.2})
end)

T.test("cosine", function()
  local f = schedule.cosine{}
  check(f, 10, {[2.5] = 0.5 * (1 + math.cos(math.pi / 4)), [5] = 0.5})
  T.equal({f(0, 10), f(10, 10)}, {1.0, 0.0})
  f = schedule.cosine{final = 0.1, warmup = 1}
  check(f, 10, {[0.5] = 0.5, [5.5] = 0.1 + 0.9 * 0.5})
  T.equal(f(10, 10), 0.1)
end)

T.test("step", function()
  local f = schedule.step{at = {3, 6.5}}
  T.equal(f(2.999, 10), 1)
  check(f, 10, {[3] = 0.1, [6.499] = 0.1, [6.5] = 0.01, [10] = 0.01})
  check(schedule.step{at = {1, 4}, factor = 0.5, warmup = 2}, 10,
        {[0.5] = 0.25, [1.5] = 0.75 * 0.5, [2] = 0.5, [4] = 0.25})
  local at = {3}
  f = schedule.step{at = at}
  at[1] = 1
  T.equal(f(2, 10), 1)                     -- the list was copied
end)

local root2, root3 = math.sqrt(2), math.sqrt(3)

T.test("to 1 ulp of the formulas", function()
  local cosines = {[0] = 1, [1 / 6] = (2 + root3) / 4, [1 / 4] = (2 + root2) / 4, [1 / 3] = 0.75,
                   [1 / 2] = 0.5, [2 / 3] = 0.25, [1] = 0}
  for t, cosine in pairs(cosines) do
    within_ulp(schedule.cosine()(t, 1), cosine)
    within_ulp(schedule.linear()(12 * t, 12), 1 - t)
    within_ulp(schedule.cosine_linear{mix = 0}(t, 1), cosine)
    within_ulp(schedule.cosine_linear{mix = 1}(t, 1), 1 - t)
    within_ulp(schedule.cosine_linear()(t, 1), 0.5 * cosine + 0.5 * (1 - t))
    within_ulp(schedule.cosine_linear{mix = 0.25}(t, 1), 0.75 * cosine + 0.25 * (1 - t))
    for power = 1, 3 do
      local product = 1
      for _ = 1, power do product = product * (1 - t) end
      within_ulp(schedule.polynomial{power = power}(t, 1), product)
    end
    within_ulp(schedule.polynomial{power = 0.5}(t, 1), math.sqrt(1 - t))
    within_ulp(schedule.polynomial()(t, 1), (1 - t) * (1 - t))
  end
end)

T.test("the mix of cosine and linear decreases, and is halfway in the middle", function()
  for _, mix in ipairs{0.0, 0.5, 1.0} do
    local f, before, sum = schedule.cosine_linear{mix = mix, final = 0.2, warmup = 2}, 2, 0
    for i = 0, 1000 do
      local value = f(2 + i * 0.008, 10)
      assert(value < before)
      before, sum = value, sum + value
    end
    within_ulp(f(2, 10), 1)
    within_ulp(f(6, 10), 0.6)
    within_ulp(f(10, 10), 0.2)
    T.near(sum / 1001, 0.6)
  end
end)

T.test("ramps", function()
  local rises = {
    linear = {[0] = 1 / 16, [1] = 19 / 64, [2] = 17 / 32, [3] = 49 / 64},
    cosine = {[0] = 1 / 16, [1] = 1 / 16 + 15 / 16 * (2 - root2) / 4, [2] = 17 / 32,
              [3] = 1 / 16 + 15 / 16 * (2 + root2) / 4},
    exponential = {[0] = 1 / 16, [1] = 1 / 8, [2] = 1 / 4, [3] = 1 / 2},
    constant = {[0] = 1 / 16, [1] = 1 / 16, [2] = 1 / 16, [3] = 1 / 16},
  }
  for ramp, values in pairs(rises) do
    local f = schedule.polynomial{power = 1, warmup = 4, ramp = ramp, start = 1 / 16}
    local g = schedule.step{at = {2}, factor = 0.5, warmup = 4, ramp = ramp, start = 1 / 16}
    local h = schedule.constant{warmup = 4, ramp = ramp, start = 1 / 16}
    for epoch, value in pairs(values) do
      within_ulp(f(epoch, 12), value)
      within_ulp(g(epoch, 12), epoch < 2 and value or value / 2)
      within_ulp(h(epoch, 12), value)
    end
    within_ulp(f(4, 12), 1)
    within_ulp(f(8, 12), 0.5)
    T.equal(h(4, 12), 1)
  end
  local f = schedule.cosine{warmup = 3, ramp = "cosine"}
  within_ulp(f(1, 9), 0.25)
  within_ulp(f(2, 9), 0.75)
end)

T.test("a learning rate that is proportional to the batch", function()
  T.near(schedule.lr_for_batch{0.1, 8192}, 3.2, 1e-15)
  T.equal(schedule.lr_for_batch{base = 0.1, batch = 128}, 0.05)
  T.equal(schedule.lr_for_batch{base = 0.25, batch = 64, per = 32}, 0.5)
  T.fails(function() schedule.lr_for_batch{0.1} end, "schedule.lr_for_batch: 'batch' is "
          .. "missing: schedule.lr_for_batch{base, batch; per=256}")
  T.fails(function() schedule.lr_for_batch{0.1, 8, per = 0} end,
          "schedule.lr_for_batch: 'per' must be a positive integer, but is 0")
end)

T.test("warm-up ends without a jump", function()
  for name, f in pairs{
    polynomial = schedule.polynomial{warmup = 3}, mix = schedule.cosine_linear{warmup = 3},
    constant = schedule.constant{warmup = 3}, linear = schedule.linear{warmup = 3},
    cosine = schedule.cosine{warmup = 3}, step = schedule.step{at = {5}, warmup = 3}} do
    T.equal(f(0, 9), 0.0)
    T.near(f(1.5, 9), 0.5)
    assert(math.abs(f(3 - 1e-9, 9) - f(3 + 1e-9, 9)) < 1e-8, name)
    T.near(f(3, 9), 1)
  end
end)

T.test("a run that ends within the warm-up, and an epoch past the end", function()
  for _, name in ipairs{"linear", "cosine"} do
    local f = schedule[name]{warmup = 3}
    check(f, 2, {1 / 3, 2 / 3})
    T.near(f(3, 3), 1)
    T.near(f(7, 6), 0)
  end
end)

T.test("a plain function can be a schedule", function()
  local f = schedule.linear{}
  local function squared(epoch, epochs) return f(epoch, epochs) ^ 2 end
  T.near(squared(5, 10), 0.25)
end)

T.test("invalid arguments", function()
  T.fails(function() schedule.cosine{warmup = -1} end,
          "schedule.cosine: 'warmup' must be a non-negative number, but is -1")
  T.fails(function() schedule.linear{final = 0 / 0} end,
          "schedule.linear: 'final' must be a non-negative number, but is nan")
  T.fails(function() schedule.cosine{warm_up = 1} end,
          "schedule.cosine: unknown key 'warm_up' (did you mean 'warmup'?)")
  T.fails(function() schedule.constant(5) end,
          "schedule.constant requires one table: schedule.constant{warmup=0.0, ramp=linear, "
          .. "start=0.0}, but got 5")
  T.fails(function() schedule.step{} end, "schedule.step: 'at' is missing: "
          .. "schedule.step{at; factor=0.1, warmup=0.0, ramp=linear, start=0.0}")
  for _, ramp in ipairs{"constant", "exponential"} do
    schedule.cosine{ramp = ramp}                       -- there is no warm-up
    T.fails(function() schedule.cosine{warmup = 1, ramp = ramp} end, ("schedule.cosine: ramp = '%s'"
            .. " requires a 'start' above 0, as in start = 0.1"):format(ramp))
  end
  T.fails(function() schedule.cosine{warmup = 1, ramp = "slow"} end,
          "schedule.cosine: 'ramp' must be "
          .. "'linear', 'cosine', 'exponential' or 'constant', but is 'slow'")
  T.fails(function() schedule.cosine{warmup = 1, start = 2} end,
          "schedule.cosine: 'start' must be a number from 0 to 1, but is 2")
  T.fails(function() schedule.cosine_linear{mix = 1.5} end,
          "schedule.cosine_linear: 'mix' must be a number from 0 to 1, but is 1.5")
  for _, at in ipairs{{}, {3, 3}, {6, 3}, {0, 3}, {-1}, {"a"}, {1, math.huge}} do
    T.fails(function() schedule.step{at = at} end,
            "schedule.step: 'at' must be a list of increasing numbers, like {30, 60}, but is a "
            .. "table")
  end
  T.fails(function() schedule.step{at = 30} end,
          "schedule.step: 'at' must be a list of increasing numbers, like {30, 60}, but is 30")
  T.fails(function() return schedule.cosin end,
          "schedule has no 'cosin' (did you mean 'cosine'?)")
end)

T.finish()
