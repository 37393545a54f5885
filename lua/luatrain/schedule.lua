-- schedule.lua - how the learning rate changes: functions f(epoch, epochs) that give what it is
-- multiplied with.
--
--   local f = lt.schedule.cosine{warmup = 1}
--   f(0.5, 10)     0.5: half of the first epoch, in which it rises
--
-- epoch is a number from 0 to epochs that moves with each step: samples seen / samples an epoch.
-- Any function of these two is a schedule. In the first `warmup` epochs the factor rises from 0 in
-- a straight line (Goyal et al. 2017, arXiv:1706.02677, section 2.2).

local check = require "luatrain.check"

local schedule = {}

local function ramp(epoch, warmup) return epoch < warmup and epoch / warmup or 1 end

-- Where epoch is between the end of the warm-up (0) and the end of all (1).
local function progress(epoch, epochs, warmup)
  return epoch > warmup and math.min((epoch - warmup) / (epochs - warmup), 1) or 0
end

local constant = check "schedule.constant{; warmup:amount=0.0}"

function schedule.constant(given)
  local o = constant(given)
  return function(epoch) return ramp(epoch, o.warmup) end
end

-- Schedules that go from 1 to `final` along a curve, which is given from (0, 1) to (1, 0).
local function falling(name, curve)
  local spec = check("schedule." .. name .. "{; final:amount=0.0, warmup:amount=0.0}")
  schedule[name] = function(given)
    local o = spec(given)
    return function(epoch, epochs)
      local high = curve(progress(epoch, epochs, o.warmup))
      return ramp(epoch, o.warmup) * (o.final + (1 - o.final) * high)
    end
  end
end

falling("linear", function(t) return 1 - t end)
falling("cosine", function(t) return 0.5 * (1 + math.cos(math.pi * t)) end)  -- arXiv:1608.03983

local step = check "schedule.step{at:epochs; factor:amount=0.1, warmup:amount=0.0}"

-- Times `factor` at each epoch of the list `at`: schedule.step{at = {30, 60, 80}}.
function schedule.step(given)
  local o = step(given)
  return function(epoch)
    local value = ramp(epoch, o.warmup)
    for _, at in ipairs(o.at) do
      if epoch >= at then value = value * o.factor end
    end
    return value
  end
end

return check.strict(schedule, "schedule")
