-- test_schedule.lua - schedules against their formulas, at their ends and where warm-up ends.
local lt = require "luatrain"
local schedule = lt.schedule
local T = require "lt_test"

T.test("constant", function()
  local f = schedule.constant()
  T.equal({f(0, 10), f(3.7, 10), f(10, 10)}, {1, 1, 1})
  f = schedule.constant{warmup = 2}
  T.equal({f(0, 10), f(0.5, 10), f(2, 10), f(9, 10)}, {0.0, 0.25, 1, 1})
end)

T.test("linear", function()
  local f = schedule.linear{}
  T.near(f(0, 4), 1)
  T.near(f(1, 4), 0.75)
  T.near(f(4, 4), 0)
  f = schedule.linear{final = 0.2, warmup = 1}
  T.near(f(0.25, 5), 0.25)
  T.near(f(1, 5), 1)
  T.near(f(3, 5), 0.6)
  T.near(f(5, 5), 0.2)
end)

T.test("cosine", function()
  local f = schedule.cosine{}
  T.equal(f(0, 10), 1.0)
  T.near(f(2.5, 10), 0.5 * (1 + math.cos(math.pi / 4)))
  T.near(f(5, 10), 0.5)
  T.equal(f(10, 10), 0.0)
  f = schedule.cosine{final = 0.1, warmup = 1}
  T.near(f(0.5, 10), 0.5)
  T.near(f(5.5, 10), 0.1 + 0.9 * 0.5)
  T.equal(f(10, 10), 0.1)
end)

T.test("step", function()
  local f = schedule.step{at = {3, 6.5}}
  T.equal(f(2.999, 10), 1)
  T.near(f(3, 10), 0.1)
  T.near(f(6.499, 10), 0.1)
  T.near(f(6.5, 10), 0.01)
  T.near(f(10, 10), 0.01)
  f = schedule.step{at = {1, 4}, factor = 0.5, warmup = 2}
  T.near(f(0.5, 10), 0.25)
  T.near(f(1.5, 10), 0.75 * 0.5)
  T.near(f(2, 10), 0.5)
  T.near(f(4, 10), 0.25)
  local at = {3}
  f = schedule.step{at = at}
  at[1] = 1
  T.equal(f(2, 10), 1)                     -- the list was copied
end)

T.test("warm-up ends without a jump", function()
  for name, f in pairs{
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
    T.near(f(1, 2), 1 / 3)
    T.near(f(2, 2), 2 / 3)
    T.near(f(3, 3), 1)
    T.near(f(7, 6), 0)
  end
end)

T.test("a plain function is a schedule of the same form", function()
  local f = schedule.linear{}
  local function squared(epoch, epochs) return f(epoch, epochs) ^ 2 end
  T.near(squared(5, 10), 0.25)
end)

T.test("refused", function()
  T.fails(function() schedule.cosine{warmup = -1} end,
          "schedule.cosine: 'warmup' wants a number from 0 up, it is -1")
  T.fails(function() schedule.linear{final = 0 / 0} end,
          "schedule.linear: 'final' wants a number from 0 up, it is " .. tostring(0 / 0))
  T.fails(function() schedule.cosine{warm_up = 1} end,
          "schedule.cosine: unknown key 'warm_up' (did you mean 'warmup'?)")
  T.fails(function() schedule.constant(5) end,
          "schedule.constant wants one table: schedule.constant{warmup=0.0}, it is 5")
  T.fails(function() schedule.step{} end, "schedule.step: 'at' must be given: "
          .. "schedule.step{at; factor=0.1, warmup=0.0}")
  for _, at in ipairs{{}, {3, 3}, {6, 3}, {0, 3}, {-1}, {"a"}, {1, math.huge}} do
    T.fails(function() schedule.step{at = at} end,
            "schedule.step: 'at' wants a list of numbers that rise, like {30, 60}, it is a table")
  end
  T.fails(function() schedule.step{at = 30} end,
          "schedule.step: 'at' wants a list of numbers that rise, like {30, 60}, it is 30")
  T.fails(function() return schedule.cosin end,
          "schedule has no 'cosin' (did you mean 'cosine'?)")
end)

T.finish()
