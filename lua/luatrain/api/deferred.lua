-- deferred.lua - losses that are read later. An accelerator computes a loss asynchronously; taking
-- it as a deferred scalar lets the host continue without waiting.

local core = ...
local check = require "luatrain.check"

local deferred = {}

local Sum = {}                 -- class: a list of losses, at least one of them deferred
Sum.__index = Sum

function Sum:number()
  local sum = 0.0
  for _, loss in ipairs(self) do sum = sum + deferred.number(loss) end
  return sum
end

-- Turns a value that all ranks have into a number, or into a deferred scalar if it is a tensor of
-- one element on an accelerator; deferred.number() reads either. who is for errors.
function deferred.scalar(loss, who)
  if not core.is_tensor(loss) or loss:count() ~= 1 or loss.device == "cpu" then
    return check.number(loss, who, "the loss")
  end
  return core.deferred(loss)
end

-- The same for the loss that a function returned. In a pipeline and its dry profile, a tensor stays
-- one: only one stage has its value.
function deferred.take(loss, who)
  if getmetatable(loss) == Sum then return loss end
  if core.is_tensor(loss) and (core.pipeline() or core.is_meta(loss)) then return loss end
  return deferred.scalar(loss, who)
end

local function add(list)
  local total = list[1]
  for i = 2, #list do total = total + list[i] end
  return total
end

-- The sum of a list of results of deferred.take(): a number if all are numbers, a tensor if they
-- are tensors, else a deferred sum that deferred.number() reads. Takes the list.
function deferred.sum(list)
  if core.is_tensor(list[1]) then return add(list) end
  local sum = setmetatable(list, Sum)
  for _, loss in ipairs(list) do
    if type(loss) ~= "number" then return sum end
  end
  return sum:number()
end

-- The value of a result of deferred.take() or deferred.sum(). Blocks until it is known.
function deferred.number(loss) return type(loss) == "number" and loss or loss:number() end

-- Raises ENUMERIC unless the loss of step number `step` is finite.
function deferred.check_finite(loss, step)
  if loss - loss == 0 then return end
  core.fail("ENUMERIC", ("the loss is %s at step %d; check the learning rate and the data")
            :format(loss ~= loss and "nan" or "inf", step))
end

return deferred
