-- data_wait.lua - detects that a run is limited by its data, and explains why.

local core = ...
local sum = require "luatrain.sum"
local thousands = require "luatrain.thousands"

local data_wait = {}
local DataWait = {}
local LAST = 50                -- number of recent steps that are considered
local SECONDS = 5              -- no warning in the first seconds of a run
local FRACTION = 0.2              -- warns above this fraction of their time

function data_wait.new()
  return setmetatable({n = 0, seconds = 0.0, waited = {}, total = {}}, {__index = DataWait})
end

local function cause(share, images_per_s, stats)
  if stats.workers == 0 then
    return ("the last %d steps spent %.0f %% of their time waiting for data. No workers prepare it "
            .. "in advance: set workers = %d in lt.run or lt.fit")
           :format(LAST, 100 * share, core.threads())
  end
  local each = stats.work_s / math.max(stats.images, 1)
  local text = ("the last %d steps spent %.0f %% of their time waiting for data. An image takes "
                .. "%.2f ms; %d %s %s images per second, but the net could process %s. ")
               :format(LAST, 100 * share, 1000 * each, stats.workers,
                       stats.workers == 1 and "worker prepares" or "workers prepare",
                       thousands(stats.workers / each), thousands(images_per_s))
  if stats.workers < core.threads() then
    return text .. ("Set workers = %d in lt.run or lt.fit"):format(core.threads())
  end
  return text .. "Use smaller images, less augmentation or more CPUs"
end

-- Called after each step. waited: seconds spent waiting for its batch of `images` images; total:
-- seconds for the whole step. Returns a warning, once per run, or nil.
function DataWait:step(waited, total, images, loader)
  local i = self.n % LAST + 1
  self.waited[i], self.total[i] = waited, total
  self.n, self.seconds = self.n + 1, self.seconds + total
  if self.said or self.n < LAST or self.seconds < SECONDS then return nil end
  local waiting, all = sum(self.waited), sum(self.total)
  if waiting <= FRACTION * all then return nil end
  self.said = true
  return cause(waiting / all, images * LAST / (all - waiting), loader:stats())
end

return data_wait
