-- phases.lua - the phases of a run, each with its own image size.
--
--   lt.fit{..., epochs = 28, batch = 512, sizes = {
--     {epochs = 13, size = 128}, {epochs = 12, size = 224, batch = 224, area = 0.087},
--     {size = 288, batch = 128, area = 0.5}}}
--
-- A phase has size, the images' height and width, or nil for their own size; batch; area, the
-- smallest fraction of an image that a random crop keeps; and `last`, its last epoch. batch and
-- area default to the settings of the run.

local core = ...
local check = require "luatrain.check"

local phases = {}

local function fail(code, ...) core.fail(code, string.format(...)) end

local spec = check "sizes{; size, epochs?, batch?, area?:share}"

-- The list of phases of a run with settings o. Checks `sizes`.
function phases.read(o)
  local list, last = {}, 0
  if o.sizes and #o.sizes == 0 then fail("EINVAL", "lt.run: sizes is empty") end
  for i, given in ipairs(o.sizes or {}) do
    local phase, is_last = spec(given), i == #o.sizes
    if not is_last and not phase.epochs then
      fail("EINVAL", "lt.run: item %d of sizes has no epochs; only the last item may omit them", i)
    end
    last = last + (phase.epochs or math.huge)
    if is_last and phase.epochs and last ~= o.epochs then
      fail("EINVAL", "lt.run: the epochs of sizes sum to %d, but those of the run are %d", last,
           o.epochs)
    end
    if is_last then last = math.huge end
    phase.last, phase.batch = last, phase.batch or o.batch
    phase.area = phase.area or o.augment.area
    list[i] = phase
  end
  if not o.sizes then list[1] = {batch = o.batch, area = o.augment.area, last = math.huge} end
  for _, phase in ipairs(list) do
    o.train:sized(phase.size)          -- raises an error if the images cannot be resized
    if phase.batch > #o.train then
      fail("EDATA", "lt.run: batch must be at most the %d images of the training set, but is %d",
           #o.train, phase.batch)
    end
  end
  return list
end

-- The phase of an epoch.
function phases.at(list, epoch)
  local i = 1
  while epoch > list[i].last do i = i + 1 end
  return list[i]
end

local MOST = 2 ^ 53            -- steps: the largest count that all JSON readers represent exactly

-- The number of steps from the position (epoch, done images in it) to the end of the last epoch, at
-- most 2^53. images: in an epoch.
function phases.steps(list, epoch, done, epochs, images)
  local steps, next_epoch = 0.0, epoch
  for _, phase in ipairs(list) do
    local last = math.min(phase.last, epochs)
    if last >= next_epoch then
      local function to_steps(n) return (n + phase.batch - 1) // phase.batch end
      if next_epoch == epoch then steps = to_steps(images - done) - to_steps(images) + 0.0 end
      steps = steps + (last - next_epoch + 1.0) * to_steps(images)
      next_epoch = last + 1
    end
  end
  return math.tointeger(math.min(steps, MOST))
end

return phases
