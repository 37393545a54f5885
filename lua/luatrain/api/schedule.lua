-- schedule.lua - how the learning rate changes: functions f(epoch, epochs) that give what it is
-- multiplied with.
--
--   local f = lt.schedule.cosine{warmup = 1}
--   f(0.5, 10)     0.5: half of the first epoch, in which it rises
--
-- epoch is a number from 0 to epochs that moves with each step: samples seen / samples an epoch.
-- Any function of these two is a schedule. In the first `warmup` epochs the factor rises from
-- `start` to 1 along `ramp`.

local core = ...
local check = require "luatrain.check"

local schedule = {}

-- ==== Warm-up ====================================================================================

-- The factor where a share t of the warm-up is over.
local ramps = {
  -- Goyal et al. 2017, arXiv:1706.02677, section 2.2: from the rate of a small batch to that of the
  -- large one, start = small / large; and what they found to be worse, the small one all the time.
  linear = function(t, start) return start + (1 - start) * t end,
  constant = function(_, start) return start end,
  -- Without a corner at either end.
  cosine = function(t, start) return start + (1 - start) * 0.5 * (1 - math.cos(math.pi * t)) end,
  -- Our own: each step raises the rate by the same share of itself, as a rate does that is
  -- proportional to the way which the weights have gone. A straight line doubles it in its second
  -- step and hardly moves it in the last; but what a net bears grows with what it is given: its
  -- sharpness settles where the rate lets it (Cohen et al. 2021, arXiv:2103.00065).
  -- docs/experiments/large_batch.txt has what came of each: in a short training it is the best.
  exponential = function(t, start) return start ^ (1 - t) end,
}

local settings = "warmup:amount=0.0, ramp:ramp=linear, start:share=0.0}"

-- The factor of an epoch because of the warm-up.
local function rising(o, name)
  local ramp, warmup, start = ramps[o.ramp], o.warmup, o.start
  if warmup > 0 and start == 0 and (o.ramp == "constant" or o.ramp == "exponential") then
    core.fail("EINVAL", ("schedule.%s: ramp = '%s' wants a 'start' above 0, as in start = 0.1")
                        :format(name, o.ramp))
  end
  return function(epoch) return epoch < warmup and ramp(epoch / warmup, start) or 1 end
end

-- Where epoch is between the end of the warm-up (0) and the end of all (1).
local function progress(epoch, epochs, warmup)
  return epoch > warmup and math.min((epoch - warmup) / (epochs - warmup), 1) or 0
end

-- ==== Schedules ==================================================================================

local constant = check("schedule.constant{; " .. settings)

function schedule.constant(given)
  local o = constant(given)
  return rising(o, "constant")
end

-- Schedules that go from 1 to `final` along a curve, which is given from (0, 1) to (1, 0), and may
-- have a setting of its own.
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
-- The share `mix` of a line, the rest of a cosine.
falling("cosine_linear", function(t, o) return (1 - o.mix) * cosine(t) + o.mix * line(t) end,
        "mix:share=0.5, ")

local step = check("schedule.step{at:epochs; factor:amount=0.1, " .. settings)

-- Times `factor` at each epoch of the list `at`: schedule.step{at = {30, 60, 80}}.
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

-- The learning rate for a batch when `base` is the one for batches of `per`: in proportion (Goyal
-- et al.). It may change at any step: the momentum of optim.sgd and optim.lars is a sum of
-- gradients, not of steps, so there is nothing to correct.
function schedule.lr_for_batch(given)
  local o = lr_for_batch(given)
  return o.base * o.batch / o.per
end

return check.strict(schedule, "schedule")
