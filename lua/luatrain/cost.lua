-- cost.lua - what a run has cost: device-hours, which is its ranks times the time that it took, and
-- how many until its accuracy was reached, at the end of the first epoch whose test top1 is at
-- least the target. Evaluation and saving are part of it; what was lost when a run was killed is
-- not. It is what one device would have needed on average, all that ranks lose to each other
-- included.
--
-- metrics.jsonl has all that: a run may go on with another number of ranks, and another target may
-- be asked for later.

local json_read = require "luatrain.json".read

local cost = {}

local READ = {start = true, epoch = true, ["end"] = true}

-- The events of such a file: those in READ whole, of others the name and the time. A torn line is
-- none.
local function events(path)
  local lines = io.lines(path, "L")
  return function()
    for line in lines do
      local name, t = line:match '^{"event":"([^"]*)","t":(-?[%d.]+).*}\n$'
      if READ[name] then
        local ok, event = pcall(json_read, line)
        if ok then return event end
      elseif name then
        return {event = name, t = tonumber(t)}
      end
    end
  end
end

-- {start = the last event "start", seconds = , device_s = , best = the highest top1, reached = }
-- of a run. target: that of the run if it is not given. reached has epoch, top1, seconds and
-- device_s of the epoch that reached it, and is nil before. until_t: the time it is now, for a run
-- that is not over.
function cost.of(path, target, until_t)
  local c, ranks = {seconds = 0.0, device_s = 0.0}, nil
  local function go_to(t)           -- which may be back, when a run goes on from a checkpoint
    c.device_s, c.seconds = c.device_s + (t - c.seconds) * ranks, t
  end
  for event in events(path) do
    ranks = ranks or event.ranks or 1
    go_to(event.t)
    if event.event == "start" then
      ranks, c.start, c.target = event.ranks, event, target or event.target
    elseif event.event == "epoch" and event.top1 then
      c.best = math.max(c.best or 0, event.top1)
      if c.target and event.top1 >= c.target and not c.reached then
        c.reached = {epoch = event.epoch, top1 = event.top1, seconds = c.seconds,
                     device_s = c.device_s}
      end
    end
  end
  if until_t and ranks then go_to(until_t) end
  return c
end

-- Adds it to the fields of a run's end line, if it can be known.
function cost.add(fields, path, target, until_t)
  local ok, c = pcall(cost.of, path, target, until_t)
  if not ok then return end
  fields.target, fields.device_hours = target, c.device_s / 3600
  if not c.reached then return end
  fields.target_epoch, fields.target_device_hours = c.reached.epoch, c.reached.device_s / 3600
end

return cost
