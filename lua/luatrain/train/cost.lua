-- cost.lua - what a run has cost: device-hours, which is its ranks times the time that it took, and
-- how many until its accuracy was reached, at the end of the first epoch whose test top1 is at
-- least the target. Evaluation and saving are part of it; what was lost when a run was killed is
-- not. It is what one device would have needed on average, all that ranks lose to each other
-- included.
--
-- metrics.jsonl has all that: a run may go on with another number of ranks, and another target may
-- be asked for later.

local json_read = require "luatrain.json".read
local lines_of = require "luatrain.train.log".lines
local sorted = require "luatrain.keys"

local cost = {}

local READ = {start = true, epoch = true, ["end"] = true}

-- The events of such a file: those in READ whole, of others the name and the time. A torn line is
-- none.
local function events(path)
  local lines = lines_of(path)
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

local function is_number(value) return type(value) == "number" end
local function is_number_or_nil(value) return value == nil or is_number(value) end
local function is_count(value) return (math.tointeger(value) or 0) >= 1 end

-- What is read of an event, each of which must have it.
local KINDS = {
  start = {ranks = is_count, threads = is_count, target = is_number_or_nil,
           device = function(value) return type(value) == "string" end},
  epoch = {epoch = is_count, top1 = is_number_or_nil}}

-- Whose name is not in the event as it should be, or nil.
local function odd_field(event)
  if not is_number(event.t) then return "t" end
  for _, name in ipairs(sorted(KINDS[event.event] or {})) do
    if not KINDS[event.event][name](event[name]) then return name end
  end
end

-- {start = the last event "start", seconds = , device_s = , best = the highest top1, reached = }
-- of a run. target: that of the run if it is not given. reached has epoch, top1, seconds and
-- device_s of the epoch that reached it, and is nil before. until_t: the time it is now, for a run
-- that is not over. nil and a reason when such a line is not as a run writes it.
function cost.of(path, target, until_t)
  local c, ranks = {seconds = 0.0, device_s = 0.0}, nil
  local function go_to(t)           -- which may be back, when a run goes on from a checkpoint
    c.device_s, c.seconds = c.device_s + (t - c.seconds) * ranks, t
  end
  for event in events(path) do
    local odd = odd_field(event)
    if odd then return nil, ("no line \"%s\" has such a '%s'"):format(event.event, odd) end
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
  if not ok or not c then return end
  fields.target, fields.device_hours = target, c.device_s / 3600
  if not c.reached then return end
  fields.target_epoch, fields.target_device_hours = c.reached.epoch, c.reached.device_s / 3600
end

return cost
