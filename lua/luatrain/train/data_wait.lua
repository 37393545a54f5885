-- data_wait.lua - detects that a run is limited by its data, and explains why.

local core = ...
local log = require "luatrain.train.log"
local sum = require "luatrain.sum"

local data_wait = {}
local DataWait = {}
local LAST = 50                -- number of recent steps that are considered
local SECONDS = 5              -- no warning in the first seconds of a run
local SHARE = 0.2              -- warns above this fraction of their time

function data_wait.new()
  return setmetatable({n = 0, seconds = 0.0, waited = {}, total = {}}, {__index = DataWait})
end

local function cause(share, images_per_s, stats)
  if stats.workers == 0 then
    return ("%.0f %% of the last %d steps was waiting for data. No worker makes it ahead: "
            .. "workers = %d in lt.run or lt.fit"):format(100 * share, LAST, core.threads())
  end
  local each = stats.work_s / math.max(stats.images, 1)
  local text = ("%.0f %% of the last %d steps was waiting for data. Making an image takes %.2f ms, "
                .. "%d %s %s images a second, the net could take %s. ")
               :format(100 * share, LAST, 1000 * each, stats.workers,
                       stats.workers == 1 and "worker makes" or "workers make",
                       log.thousands(stats.workers / each), log.thousands(images_per_s))
  if stats.workers < core.threads() then
    return text .. ("workers = %d in lt.run or lt.fit makes more at once"):format(core.threads())
  end
  return text .. "Smaller images, less augmentation or more CPUs help"
end

-- Called after each step. waited: seconds spent waiting for its batch of `images` images; total:
-- seconds for the whole step. Returns a warning, once per run, or nil.
function DataWait:step(waited, total, images, loader)
  local i = self.n % LAST + 1
  self.waited[i], self.total[i] = waited, total
  self.n, self.seconds = self.n + 1, self.seconds + total
  if self.said or self.n < LAST or self.seconds < SECONDS then return nil end
  local waiting, all = sum(self.waited), sum(self.total)
  if waiting <= SHARE * all then return nil end
  self.said = true
  return cause(waiting / all, images * LAST / (all - waiting), loader:stats())
end

return data_wait
