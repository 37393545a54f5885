-- scaler.lua - the loss scaler for training in fp16: its options, its methods and its saved state.
--
--   local scaler = require "luatrain.api.scaler".new{policy = "dynamic"}
--   scaler:inside(fn, ...)     -- calls fn; its backward passes and steps use this scale
--   scaler.scale               -- the current scale; also .steps, .skipped, .headroom, .last_scale

local core = ...
local check = require "luatrain.check"
local unused_options = require "luatrain.api.unused_options"

local scaler = {}
local Scaler = require "luatrain.arity".methods("scaler:", "luatrain.Scaler")
local HANDLE = {}              -- key of the handle from core.new_loss_scale
local MADE = {}                -- key of the settings that it was made with

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- Fields that can be read: from the current state (scale, steps, skipped) and from the last step
-- (last_scale, headroom).
local fields = {
  scale = function(handle) return 2.0 ^ handle:now() end,
  last_scale = function(handle) return 2.0 ^ handle:last() end,
  headroom = function(handle) return (select(2, handle:last())) end,
  steps = function(handle) return (select(2, handle:now())) end,
  skipped = function(handle) return (select(3, handle:now())) end,
}

local meta
meta = {
  __name = "luatrain.Scaler",
  __index = function(self, key)
    if fields[key] then return fields[key](rawget(self, HANDLE)) end
    return check.strict(Scaler, "a scaler")[key]
  end,
  __newindex = function(_, key) fail("a scaler has no settable field '%s'", tostring(key)) end,
}

local spec = check("amp.scaler{; policy:policy=adaptive, scale:amount=65536.0, "
                   .. "growth_interval=2000}")

-- A new scaler. scale: the initial scale, a power of two. growth_interval: for policy dynamic only.
function scaler.new(options)
  local o = spec(options)
  local fraction, exponent = o.scale, 0
  while fraction >= 2 and exponent < 25 do fraction, exponent = fraction / 2, exponent + 1 end
  while fraction < 1 and exponent > -15 do fraction, exponent = fraction * 2, exponent - 1 end
  if fraction ~= 1 or exponent < -14 or exponent > 24 then
    fail("amp.scaler: 'scale' must be a power of two from 2^-14 to 2^24, but is %.14g", o.scale)
  end
  if o.growth_interval < 1 or o.growth_interval > 0x7fffffff then
    fail("amp.scaler: 'growth_interval' must be 1 to 2147483647, but is %d", o.growth_interval)
  elseif options and options.growth_interval and o.policy ~= "dynamic" then
    fail("amp.scaler: 'growth_interval' is only for policy dynamic, not for %s", o.policy)
  end
  local made = {scale = o.scale,
                growth_interval = o.policy == "dynamic" and o.growth_interval or nil}
  return setmetatable({[HANDLE] = core.new_loss_scale(o.policy, exponent, o.growth_interval),
                       [MADE] = made}, meta)
end

-- EDESYNC unless all ranks have the same scaler state. All ranks update it with the same votes at
-- each step, so states that are equal once stay equal.
function Scaler:compare()
  if select(2, core.rank()) == 1 then return end
  local state = self:state()
  local lines = {}
  for name, value in pairs(state) do
    lines[#lines + 1] = ("%s %s"):format(name, math.type(value) == "float" and ("%a"):format(value)
                                               or value)
  end
  table.sort(lines)
  core.compare("the loss scale", ("policy %s\nscale %.14g\ninterval %d\n%s")
               :format(scaler.policy_of(state), self.scale, state.interval,
                       table.concat(lines, "\n")))
end

-- Calls fn(...) with this scale in use and returns its results. Restores the previous scale
-- afterwards, even after an error.
function Scaler:inside(fn, ...)
  local handle = self[HANDLE]
  if type(fn) ~= "function" then
    fail("scaler:inside requires a function, but got %s", check.shown(fn))
  end
  local before = core.use_loss_scale(handle)
  local _ <close> = setmetatable({}, {__close = function() core.use_loss_scale(before) end})
  return fn(...)
end

-- Puts this scale in use for all backward passes and optimizer steps until close(). EINVAL if
-- another scaler is in use. All ranks must call begin, and load, together.
function Scaler:begin()
  local handle = self[HANDLE]
  self:compare()
  local before = core.use_loss_scale(handle)
  if before and before ~= handle then
    core.use_loss_scale(before)
    fail "amp.scaler: another scaler is in use; close it with scaler:close()"
  end
  unused_options.scaler = true
  return self
end

-- The number of the last step that was submitted. Does not block.
function Scaler:latest() return self[HANDLE]:latest() end

-- Returns the scale of step `number`, its headroom in bits (nil if its gradients were not finite or
-- all zero), and the number of steps skipped up to it. Only the last eight steps are kept; for
-- another number, or nil, these are the values of the last step.
function Scaler:at(number)
  local handle = self[HANDLE]
  if number ~= nil and not math.tointeger(number) then
    fail("scaler:at requires the number of a step, but got %s", check.shown(number))
  end
  local k, headroom, skipped = handle:last(number)
  return 2.0 ^ k, headroom, skipped
end

function Scaler:close()
  local handle = self[HANDLE]
  local before = core.use_loss_scale(nil)
  if before ~= handle then core.use_loss_scale(before) end
end
function meta.__close(self) self:close() end

-- The settings that it was made with. growth_interval is nil unless the policy is dynamic.
function Scaler:settings()
  local made = self[MADE]
  return {scale = made.scale, growth_interval = made.growth_interval}
end

-- The whole state, as a flat table of numbers.
function Scaler:state()
  return self[HANDLE]:state()
end

function Scaler:load(state)
  local handle = self[HANDLE]
  if type(state) ~= "table" then fail("scaler:load requires a table, but got a %s", type(state)) end
  local was, is = scaler.policy_of(state), scaler.policy_of(self:state())
  if was and was ~= is then
    fail("scaler:load: the state has policy %s, but the scaler has policy %s", was, is)
  end
  handle:load(state)
  self:compare()
end

-- Loads the state of a scaler that was made with other settings; the settings of this scaler apply.
-- changed[name] is true for each setting that differs. If the scale differs, it restarts from this
-- scaler's initial scale, with its counts of consecutive good and skipped steps at 0.
function Scaler:load_with_changes(state, changed)
  local first = self:state()
  self:load(state)
  local now = self:state()
  if changed.scale then
    now.k, now.good, now.in_a_row, now.at_floor = first.k, 0, 0, 0
  end
  if changed.growth_interval then
    now.interval, now.good = first.interval, math.min(now.good, first.interval)
  end
  self:load(now)
end

-- Puts a scaler in use and returns the handle of the previous one, or nil.
function scaler.use(self) return core.use_loss_scale(rawget(self, HANDLE)) end

-- The name of the policy in a state, or nil if the state has none.
function scaler.policy_of(state)
  local index = math.tointeger(state.policy)
  return index and core.policies[index + 1]
end

return scaler
