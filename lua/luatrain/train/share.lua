-- share.lua - --share: the ranks get unequal parts of each batch, because some compute faster than
-- others. With --share auto, the first steps of a run use equal parts and are timed; then the parts
-- are chosen that make the step shortest. Gradients remain means over the global batch: see
-- lt_reducer_set_share() in dist/dist.h.

local core = ...
local command_line = require "luatrain.command_line"
local median = require "luatrain.median"
local ranks = require "luatrain.train.ranks"

local share = {}

local Share = {}
local meta = {__name = "luatrain.Share", __index = Share}

-- The first steps of a run are not timed, because they allocate memory and make plans.
local WARM_UP, TIMED = 3, 8
local LEAST = 0.05      -- fraction of a step's time that unequal shares must save

local function setting() return command_line.variable "LUATRAIN_SHARE" end

-- The list of --share 3,1: {3, 1}. nil without a list.
function share.list()
  local text = setting()
  if not text or text == "auto" then return nil end
  local list = {}
  for number in text:gmatch "[^,]+" do list[#list + 1] = math.tointeger(tonumber(number)) end
  return list
end

-- Applies --share N,N,... to this rank. Called when the state has joined its group.
function share.begin()
  if not setting() then return end
  if core.joins_async() or core.joins_pipeline() then
    core.fail("EUSAGE", "--share cannot be combined with --parallel")
  end
  core.compare("--share", setting())
  local list, _, size = share.list(), core.rank()
  if not list then return end
  if #list ~= size then
    core.fail("EUSAGE", ("--share requires one number for each of the %d ranks, but '%s' has %d")
                        :format(size, setting(), #list))
  end
  core.set_share(list)
end

-- The measurement for a run, or false without --share auto. Each run makes its own.
function share.of(run)
  if setting() ~= "auto" or run.ranks == 1 then return false end
  if core.device() ~= "cpu" then       -- where the time of a step contains the wait for other ranks
    core.fail("EUSAGE", ("lt.run: --share auto measures CPUs, but this rank computes on %s; give "
                         .. "the parts of the ranks: --share N,N,..."):format(core.device()))
  end
  core.set_share(nil)
  local self = setmetatable({parts = false, steps = 0, seconds = {}}, meta)
  self.images = (run.settings.batch - 1) // run.grain + 1   -- or pairs that stay on one rank
  if self.images < run.ranks then
    core.fail("EUSAGE", ("lt.run: --share auto requires batches of at least %d images on %d ranks, "
                         .. "but batch is %d"):format(run.ranks * run.grain, run.ranks,
                                                      run.settings.batch))
  end
  return self
end

-- Takes the shares of a checkpoint, unless that was made on another number of ranks.
function Share:restore(parts, path)
  local list, _, size = {}, core.rank()
  for i = 1, size do list[i] = parts[tostring(i)] end
  if #list ~= size or parts[tostring(size + 1)] then return end
  for _, part in ipairs(list) do
    if math.type(part) ~= "integer" or part < 1 or part > 0x7fffffff // size then
      core.fail("EFILE", ("%s: the checkpoint has an invalid 'share'"):format(path))
    end
  end
  self.parts = list
  core.set_share(list)
end

-- The time of the slowest rank. seconds: of each rank for an image.
local function slowest(parts, seconds)
  local most = 0.0
  for i, part in ipairs(parts) do most = math.max(most, part * seconds[i]) end
  return most
end

-- The equal shares, as the ranks have them without --share.
local function equal(n)
  local list = {}
  for i = 1, n do list[i] = 1 end
  return list
end

-- Divides n images among ranks so that the slowest rank finishes as early as possible, and each
-- has at least one: every further image goes to the rank that then finishes first.
local function divided(n, seconds)
  local parts = equal(#seconds)
  for _ = #parts + 1, n do
    local best = 1
    for i = 2, #parts do
      if (parts[i] + 1) * seconds[i] < (parts[best] + 1) * seconds[best] then best = i end
    end
    parts[best] = parts[best] + 1
  end
  return parts
end

local text_of = core.in_c_locale(function(parts, rates, is_equal)
  local texts = {}
  for i, rate in ipairs(rates) do texts[i] = (rate < 100 and "%.3g" or "%.0f"):format(rate) end
  return ("share auto: the ranks get %s parts of each batch, because they compute %s images per "
          .. "second"):format(is_equal and "equal" or table.concat(parts, ","),
                              table.concat(texts, ", "))
end)

-- Decides on the shares, the same on all ranks. mine: this rank's seconds for an image.
local function choose(self, run, mine)
  local seconds, size = ranks.gather("--share auto", {mine}), run.ranks
  if math.min(table.unpack(seconds)) == 0 then
    self.steps = WARM_UP               -- some rank had no images; time the next steps instead
    return
  end
  self.parts = divided(self.images, seconds)
  local even = (self.images + size - 1) // size * math.max(table.unpack(seconds))
  local is_equal = slowest(self.parts, seconds) > (1 - LEAST) * even
  if is_equal then self.parts = equal(size) end
  core.set_share(self.parts)
  local rates = {}
  for i, s in ipairs(seconds) do rates[i] = run.grain / s end
  run.log:event("share", {step = run.steps, share = self.parts, images_per_s = rates})
  run.log:note(text_of(self.parts, rates, is_equal))
end

-- Called after each step of a run, with the rows of its batch. After the last timed step, sets the
-- shares of the next ones. A rank's time is how long the function in run:step took, without the
-- waits for other ranks.
function Share:end_step(run, rows)
  if self.parts or run.settings.trial then return end
  self.steps = self.steps + 1
  if self.steps > WARM_UP then
    local _, count = core.shard(rows, 1, run.grain)
    if count > 0 then
      table.insert(self.seconds, (run.spent.inside - run.spent.waited) * run.grain / count)
    end
  end
  if self.steps < WARM_UP + TIMED then return end
  choose(self, run, #self.seconds > 0 and math.max(median(self.seconds), 1e-9) or 0.0)
end

return share
