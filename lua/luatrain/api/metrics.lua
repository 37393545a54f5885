-- metrics.lua - lt.metrics: what an evaluation counts besides the loss.
--
-- A metric is a table {name = , count = }. count(logits, y) returns the number of correct
-- predictions in a batch, or another sum over its samples, as a number or a tensor of one element.
-- The evaluation divides the sum over all samples by their number. To add a metric to lt.metrics,
-- add it to the table `metrics` below.

local core = ...
local check = require "luatrain.check"
local ops = core.ops

local metrics = {}

local top = check "lt.metrics.top{k}"

-- lt.metrics.top(k): the fraction of samples with fewer than k logits above the label's logit. NaN
-- is above all numbers, and a label with a NaN logit is wrong. top(1) compares with argmax instead,
-- which is the first of the largest logits or the first NaN. logits: (n, classes); y: (n) of i64.
function metrics.top(k)
  k = top:value("k", k)
  local function count(logits, y)
    if k == 1 then return ops.eq(ops.argmax(logits, 2), y):sum() end
    local n, classes = logits:dim(1), logits:dim(2)
    local class = core.constructors.arange(0, classes, 1, {dtype = "i64"}):reshape{1, classes}
    local own = ops.where(ops.eq(class, y:reshape{n, 1}), logits, 0):sum(2, true)
    return ops.gt(ops.le(logits, own):sum(2), classes - k):sum()
  end
  return {name = "top" .. k, count = count}
end

metrics.top1 = metrics.top(1)
metrics.top5 = metrics.top(5)

local spec = check "metric{name:string, count:call}"
local taken = {loss = true, test_loss = true, train_loss = true}

-- Checks a list of metrics and returns it; nil means {metrics.top1}. Errors start with `who`.
function metrics.read(list, who)
  local read = {}
  for i, metric in ipairs(list or {metrics.top1}) do
    read[i] = spec(metric)
    local name = read[i].name
    if not name:find "^[%a_][%w_]*$" or taken[name] then
      core.fail("EINVAL", ("%s: a metric cannot be called %q"):format(who, name))
    end
    for k = 1, i - 1 do
      if read[k].name == name then
        core.fail("EINVAL", ("%s: two metrics are called '%s'"):format(who, name))
      end
    end
  end
  return read
end

return metrics
