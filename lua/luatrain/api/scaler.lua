-- scaler.lua - the loss scale of training in fp16: what is made from a script's options, and saved.
--
--   local scaler = require "luatrain.api.scaler".new{policy = "dynamic"}
--   scaler:inside(fn, ...)     -- what fn returns; its backwards and steps are under this scale
--   scaler.scale               -- now; also scaler.steps, scaler.skipped, scaler.headroom

local core = ...
local check = require "luatrain.check"
local unused_options = require "luatrain.train.unused_options"

local scaler = {}
local Scaler = require "luatrain.arity".methods "scaler:"
local HANDLE = {}              -- key of what core.new_loss_scale gave
local MADE = {}                -- of the settings that the script has made it with

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- What else can be read: of the scale's state, and of its last step.
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
  __newindex = function(_, key) fail("a scaler has no '%s' to be set", tostring(key)) end,
}

local spec = check("amp.scaler{; policy:policy=adaptive, scale:amount=65536.0, "
                   .. "growth_interval=2000}")

-- growth_interval is that of policy dynamic.
function scaler.new(options)
  local o = spec(options)
  local fraction, exponent = o.scale, 0
  while fraction >= 2 and exponent < 25 do fraction, exponent = fraction / 2, exponent + 1 end
  while fraction < 1 and exponent > -15 do fraction, exponent = fraction * 2, exponent - 1 end
  if fraction ~= 1 or exponent < -14 or exponent > 24 then
    fail("amp.scaler: 'scale' wants a power of two from 2^-14 to 2^24, it is %.14g", o.scale)
  end
  if o.growth_interval < 1 or o.growth_interval > 0x7fffffff then
    fail("amp.scaler: 'growth_interval' wants 1 to 2147483647, it is %d", o.growth_interval)
  elseif options and options.growth_interval and o.policy ~= "dynamic" then
    fail("amp.scaler: 'growth_interval' is of policy dynamic, this is %s", o.policy)
  end
  local made = {scale = o.scale,
                growth_interval = o.policy == "dynamic" and o.growth_interval or nil}
  return setmetatable({[HANDLE] = core.new_loss_scale(o.policy, exponent, o.growth_interval),
                       [MADE] = made}, meta)
end

local function handle_of(self, who)
  if getmetatable(self) ~= meta then fail("%s is written with a colon, as it is here", who) end
  return rawget(self, HANDLE)
end

-- Scalers of several ranks are told the same of each step, and stay alike if they are so at first.
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

-- Calls fn(...) under this scale; afterwards that of before is back.
function Scaler:inside(fn, ...)
  local handle = handle_of(self, "scaler:inside")
  if type(fn) ~= "function" then
    fail("scaler:inside wants a function, it is %s", check.shown(fn))
  end
  local before = core.use_loss_scale(handle)
  local _ <close> = setmetatable({}, {__close = function() core.use_loss_scale(before) end})
  return fn(...)
end

-- From now on all backwards and steps are under this scale, until it is closed. All ranks call
-- this, and load, together.
function Scaler:begin()
  local handle = handle_of(self, "scaler:begin")
  self:compare()
  local before = core.use_loss_scale(handle)
  if before and before ~= handle then
    core.use_loss_scale(before)
    fail "amp.scaler: another one is in use; scaler:close() ends that"
  end
  unused_options.scaler = true
  return self
end

-- The number of the last step that was asked about, which is not waited for.
function Scaler:latest() return handle_of(self, "scaler:latest"):latest() end

-- Of that step, if it is one of the last: its scale, its headroom, how many were skipped up to it.
function Scaler:at(number)
  local handle = handle_of(self, "scaler:at")
  if number ~= nil and not math.tointeger(number) then
    fail("scaler:at wants the number of a step, it is %s", check.shown(number))
  end
  local k, headroom, skipped = handle:last(number)
  return 2.0 ^ k, headroom, skipped
end

function Scaler:close()
  local handle = handle_of(self, "scaler:close")
  local before = core.use_loss_scale(nil)
  if before ~= handle then core.use_loss_scale(before) end
end
function meta.__close(self) self:close() end

-- What it was made with, as far as that matters to its policy.
function Scaler:settings()
  handle_of(self, "scaler:settings")
  local made = rawget(self, MADE)
  return {scale = made.scale, growth_interval = made.growth_interval}
end

-- All of it in a flat table of numbers.
function Scaler:state()
  return handle_of(self, "scaler:state"):state()
end

function Scaler:load(state)
  local handle = handle_of(self, "scaler:load")
  if type(state) ~= "table" then fail("scaler:load wants a table, it is a %s", type(state)) end
  local was, is = scaler.policy_of(state), scaler.policy_of(self:state())
  if was and was ~= is then
    fail("scaler:load: the state is that of policy %s, the scaler's is %s", was, is)
  end
  handle:load(state)
  self:compare()
end

-- Loads a state of a scaler that was made with settings of which this one has other values, which
-- hold: the scale is the first one again, and nothing was skipped under it. changed[name] is true
-- of these.
function Scaler:load_but(state, changed)
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

-- The policy's name in a state; nil if there is none.
function scaler.policy_of(state)
  local index = math.tointeger(state.policy)
  return index and core.policies[index + 1]
end

return scaler
