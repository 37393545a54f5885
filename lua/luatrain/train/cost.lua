-- cost.lua - the cost of a run in device-hours: its wall time times its ranks, whose number changes
-- when workers join the run or are lost. Also the cost until a target accuracy was reached, which
-- is at the end of the first epoch whose test top1 is at least the target. Evaluation, saving and
-- the overhead of communication are included; work lost when a run was killed is not.
--
-- It is computed from metrics.jsonl, since a run may resume with another number of ranks, and a
-- user may ask for another target later.

local json_read = require "luatrain.json".read
local lines_of = require "luatrain.train.log".lines
local sorted = require "luatrain.keys"

local cost = {}

local READ = {start = true, epoch = true, joined = true, lost = true, ["end"] = true}

-- Iterates over the events of a metrics.jsonl: those in READ complete, others as {event, t} only.
-- Skips torn lines.
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

-- The fields that an event must have, each with a function that checks its value.
local KINDS = {
  start = {ranks = is_count, threads = is_count, target = is_number_or_nil,
           device = function(value) return type(value) == "string" end},
  epoch = {epoch = is_count, top1 = is_number_or_nil},
  joined = {ranks = is_count}, lost = {ranks = is_count}}

-- The name of the first field that is missing or invalid in an event, or nil.
local function odd_field(event)
  if not is_number(event.t) then return "t" end
  for _, name in ipairs(sorted(KINDS[event.event] or {})) do
    if not KINDS[event.event][name](event[name]) then return name end
  end
end

-- Returns the cost of the run whose metrics.jsonl is at path: {start = the last event "start",
-- ranks = the most ranks since then, seconds = , device_s = , best = the highest top1, target = ,
-- reached = }. target defaults to the run's target. reached has epoch, top1, seconds and device_s
-- of the epoch that reached it, or is nil. until_t: the current time in seconds since the run
-- began, for a run that is not over. Returns nil and a reason if a line is not as a run writes it.
function cost.of(path, target, until_t)
  local c, ranks = {seconds = 0.0, device_s = 0.0}, nil
  local function go_to(t)           -- goes backward when a run resumes from a checkpoint
    c.device_s, c.seconds = c.device_s + (t - c.seconds) * ranks, t
  end
  for event in events(path) do
    local odd = odd_field(event)
    if odd then return nil, ("the line \"%s\" has an invalid '%s'"):format(event.event, odd) end
    ranks = ranks or event.ranks or 1
    go_to(event.t)
    if event.event == "start" then
      ranks, c.start, c.target = event.ranks, event, target or event.target
      c.ranks = ranks
    elseif event.event == "joined" or event.event == "lost" then
      ranks = event.ranks
      c.ranks = math.max(c.ranks or 1, ranks)
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

-- Adds the cost to the fields of a run's end line, if it can be computed.
function cost.add(fields, path, target, until_t)
  local ok, c = pcall(cost.of, path, target, until_t)
  if not ok or not c then return end
  fields.target, fields.device_hours = target, c.device_s / 3600
  if not c.reached then return end
  fields.target_epoch, fields.target_device_hours = c.reached.epoch, c.reached.device_s / 3600
end

return cost
