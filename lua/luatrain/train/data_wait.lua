-- data_wait.lua - notices when a run waits for its data, and says why.

local core = ...
local log = require "luatrain.train.log"
local sum = require "luatrain.sum"

local data_wait = {}
local DataWait = {}
local LAST = 50                -- steps that are looked at
local SECONDS = 5              -- the first ones do not count
local SHARE = 0.2              -- of the time of these steps

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

-- After each step: how long it waited for its batch of images, and how long it took. Returns a
-- warning, once.
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
