-- mixup.lua - lt.mixup: mixes pairs of images (Zhang et al. 2018, mixup: Beyond Empirical Risk
-- Minimization, arXiv:1710.09412).
--
--   local mixed, other, share = lt.mixup(x, y, 0.2)
--   local z = net(mixed)
--   local loss = share * lt.cross_entropy(z, y) + (1 - share) * lt.cross_entropy(z, other)
--
-- Images 1 and 2 of a batch are mixed with each other, images 3 and 4, and so on; the last image of
-- an odd batch is not mixed. The batch is shuffled, so the pairs are random. Because the pairs are
-- fixed, splitting a batch over ranks does not change the result if no pair is split:
-- lt.run{mixup = 0.2} and lt.fit keep pairs together.
--
-- One share is drawn per step from Beta(alpha, alpha), as a function of seed and step.

local core = ...
local check = require "luatrain.check"
local ops = core.ops

-- Draws from Beta(alpha, alpha), given u and v, uniform in (0, 1). The result is
-- (1 + t / sqrt(2 alpha + t^2)) / 2, where t has Student's distribution with 2 alpha degrees of
-- freedom, drawn by Bailey's polar method (Devroye 1996, Random variate generation in one line of
-- code).
local function draw_beta(alpha, u, v)
  local cosine = math.cos(2 * math.pi * v)
  local squared = (u ^ (-1 / alpha) - 1) * cosine ^ 2        -- t^2 / (2 alpha)
  local half = 0.5 / math.sqrt(1 + 1 / squared)
  return cosine < 0 and 0.5 - half or 0.5 + half
end

-- Returns x with rows 1 and 2, 3 and 4, ... exchanged.
local function exchange(x)
  local shape, pairs = x.shape, x:dim(1) // 2
  if pairs == 0 then return x end
  local even = {2 * pairs, table.unpack(shape, 2)}
  local rows = ops.reshape(ops.slice(x, 1, 1, 2 * pairs), {pairs, 2, x:count() // shape[1]})
  rows = ops.reshape(ops.cat({ops.slice(rows, 2, 2, 2), ops.slice(rows, 2, 1, 1)}, 2), even)
  if shape[1] == 2 * pairs then return rows end
  return ops.cat({rows, ops.slice(x, 1, shape[1], shape[1])}, 1)
end

local spec = check "lt.mixup{x:tensor, y:tensor, alpha:amount}"

-- Returns the mixed images, (n, ...) as x; for each image, the label of the image mixed into it,
-- (n); and the weight of the original image, from 0 to 1.
return function(x, y, alpha)
  x, y, alpha = spec:value("x", x), spec:value("y", y), spec:value("alpha", alpha)
  if x:dim(1) ~= y:dim(1) then
    core.fail("EINVAL", ("lt.mixup: x has %d samples, but y has %d"):format(x:dim(1), y:dim(1)))
  end
  if alpha == 0 then return x, y, 1.0 end
  local share = draw_beta(alpha, core.mixup_draws())
  return x * share + exchange(x) * (1 - share), exchange(y), share
end
