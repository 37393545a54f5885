-- deferred.lua - losses as deferred scalars: on an accelerator the host does not wait for a loss,
-- but reads its value later.

local core = ...
local check = require "luatrain.check"

local deferred = {}

local Sum = {}
Sum.__index = Sum

function Sum:number()
  local sum = 0.0
  for _, loss in ipairs(self) do sum = sum + deferred.number(loss) end
  return sum
end

-- What a function has returned for its loss: a number, or what deferred.number() makes one of.
function deferred.take(loss, who)
  if getmetatable(loss) == Sum then return loss end
  if not core.is_tensor(loss) or loss:count() ~= 1 or loss.device == "cpu" then
    return check.number(loss, who)
  end
  return core.deferred(loss)
end

-- The sum of such losses, as deferred.take() gives it.
function deferred.sum(list)
  local sum = setmetatable(list, Sum)
  for _, loss in ipairs(list) do
    if type(loss) ~= "number" then return sum end
  end
  return sum:number()
end

-- Waits for it, if it is not there yet.
function deferred.number(loss) return type(loss) == "number" and loss or loss:number() end

-- That of a step is to be finite.
function deferred.check_finite(loss, step)
  if loss - loss == 0 then return end
  core.fail("ENUMERIC", ("the loss is %s at step %d; look at the learning rate and at the data")
            :format(loss ~= loss and "nan" or "inf", step))
end

return deferred
