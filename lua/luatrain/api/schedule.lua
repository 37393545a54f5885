-- schedule.lua - learning rate schedules. A schedule is a function f(epoch, epochs) that returns a
-- factor for the learning rate.
--
--   local f = lt.schedule.cosine{warmup = 1}
--   f(0.5, 10)     0.5: halfway through the warm-up epoch
--
-- epoch is a fractional number from 0 to epochs that grows with each step: samples seen / samples
-- per epoch. Any function of these two arguments is a schedule. During the first `warmup` epochs
-- the factor rises from `start` to 1 along the curve `ramp`.

local core = ...
local check = require "luatrain.check"

local schedule = {}

-- ==== Warm-up ====================================================================================

-- The factor at fraction t of the warm-up, 0 <= t < 1.
local ramps = {
  -- Goyal et al. 2017, arXiv:1706.02677, section 2.2. linear rises from the learning rate of a
  -- small batch to the rate of the large one: start = small / large. constant keeps the small rate
  -- until the warm-up ends; they found it to be worse.
  linear = function(t, start) return start + (1 - start) * t end,
  constant = function(_, start) return start end,
  -- Smooth at both ends.
  cosine = function(t, start) return start + (1 - start) * 0.5 * (1 - math.cos(math.pi * t)) end,
  -- Our own: each step multiplies the rate by the same factor. A rate proportional to the distance
  -- that the weights have moved would grow like this. A linear ramp from 0 doubles the rate in its
  -- second step and barely changes it in the last. But the rate that a net tolerates grows with the
  -- rate at which it is trained: its sharpness settles at the limit that the rate sets (Cohen et
  -- al. 2021, arXiv:2103.00065). docs/experiments/large_batch.txt compares the ramps; in a
  -- short training run, exponential is the best.
  exponential = function(t, start) return start ^ (1 - t) end,
}

local settings = "warmup:amount=0.0, ramp:ramp=linear, start:share=0.0}"

-- Returns the warm-up factor as a function of epoch, for the options o of schedule `name`.
local function rising(o, name)
  local ramp, warmup, start = ramps[o.ramp], o.warmup, o.start
  if warmup > 0 and start == 0 and (o.ramp == "constant" or o.ramp == "exponential") then
    core.fail("EINVAL", ("schedule.%s: ramp = '%s' requires a 'start' above 0, as in start = 0.1")
                        :format(name, o.ramp))
  end
  return function(epoch) return epoch < warmup and ramp(epoch / warmup, start) or 1 end
end

-- The position of epoch between the end of the warm-up (0) and the end of training (1).
local function progress(epoch, epochs, warmup)
  return epoch > warmup and math.min((epoch - warmup) / (epochs - warmup), 1) or 0
end

-- ==== Schedules ==================================================================================

local constant = check("schedule.constant{; " .. settings)

function schedule.constant(given)
  local o = constant(given)
  return rising(o, "constant")
end

-- Defines a schedule that falls from 1 to `final` after the warm-up. curve(t, options) falls from 1
-- at t = 0 to 0 at t = 1. own: text of the check for options of this curve.
local function falling(name, curve, own)
  local spec = check(("schedule.%s{; %sfinal:amount=0.0, "):format(name, own or "") .. settings)
  schedule[name] = function(given)
    local o = spec(given)
    local rise = rising(o, name)
    return function(epoch, epochs)
      local high = curve(progress(epoch, epochs, o.warmup), o)
      return rise(epoch) * (o.final + (1 - o.final) * high)
    end
  end
end

local function line(t) return 1 - t end
local function cosine(t) return 0.5 * (1 + math.cos(math.pi * t)) end

falling("linear", line)
falling("cosine", cosine)                            -- Loshchilov and Hutter 2017, arXiv:1608.03983
falling("polynomial", function(t, o) return (1 - t) ^ o.power end, "power:amount=2.0, ")
-- The weighted mean of a line, with weight `mix`, and a cosine.
falling("cosine_linear", function(t, o) return (1 - o.mix) * cosine(t) + o.mix * line(t) end,
        "mix:share=0.5, ")

local step = check("schedule.step{at:epochs; factor:amount=0.1, " .. settings)

-- Multiplies the rate by `factor` at each epoch in the list `at`: schedule.step{at = {30, 60, 80}}.
function schedule.step(given)
  local o = step(given)
  local rise = rising(o, "step")
  return function(epoch)
    local value = rise(epoch)
    for _, at in ipairs(o.at) do
      if epoch >= at then value = value * o.factor end
    end
    return value
  end
end

-- ==== Large batches ==============================================================================

local lr_for_batch = check "schedule.lr_for_batch{base:amount, batch; per:count=256}"

-- The learning rate for batches of `batch` samples, in proportion to `base`, the rate for batches
-- of `per` samples (linear scaling, Goyal et al.). The rate may change at any step without momentum
-- correction, because the momentum of optim.sgd and optim.lars sums gradients, not steps.
function schedule.lr_for_batch(given)
  local o = lr_for_batch(given)
  return o.base * o.batch / o.per
end

return check.strict(schedule, "schedule")
