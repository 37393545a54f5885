-- scaler.lua - the loss scale of training in fp16: what is made from a script's options, and saved.
--
--   local scaler = require "luatrain.scaler".new{policy = "dynamic"}
--   scaler:inside(fn, ...)     -- what fn returns; its backwards and steps are under this scale
--   scaler.scale               -- now; also scaler.steps, scaler.skipped, scaler.headroom

local core = ...
local check = require "luatrain.check"
local unused = require "luatrain.unused"

local Scaler = {}
local HANDLE = {}              -- key of what core.new_loss_scale gave

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- What else can be read: of the scale's state, and of its last step.
local fields = {
  scale = function(handle) return 2.0 ^ handle:now() end,
  last_scale = function(handle) return 2.0 ^ handle:last() end,
  headroom = function(handle) return (select(2, handle:last())) end,
  steps = function(handle) return (select(2, handle:now())) end,
  skipped = function(handle) return (select(3, handle:now())) end,
  sent_again = function(handle) return (select(4, handle:now())) end,
}

local meta = {
  __name = "luatrain.Scaler",
  __index = function(self, key)
    if fields[key] then return fields[key](rawget(self, HANDLE)) end
    return check.strict(Scaler, "a scaler")[key]
  end,
  __newindex = function(_, key) fail("a scaler has no '%s' to be set", tostring(key)) end,
}

local spec = check("amp.scaler{; policy:policy=adaptive, scale:amount=65536.0, "
                   .. "growth_interval=2000}")

local scaler = {}

-- growth_interval is that of policy dynamic.
function scaler.new(options)
  local o = spec(options)
  local fraction, exponent = o.scale, 0
  while fraction >= 2 and exponent < 25 do fraction, exponent = fraction / 2, exponent + 1 end
  while fraction < 1 and exponent > -15 do fraction, exponent = fraction * 2, exponent - 1 end
  if fraction ~= 1 or exponent < -14 or exponent > 24 then
    fail("amp.scaler: 'scale' wants a power of two from 2^-14 to 2^24, it is %.14g", o.scale)
  end
  return setmetatable({[HANDLE] = core.new_loss_scale(o.policy, exponent, o.growth_interval)}, meta)
end

-- Calls fn(...) under this scale; afterwards that of before is back.
function Scaler:inside(fn, ...)
  local before = core.use_loss_scale(rawget(self, HANDLE))
  local _ <close> = setmetatable({}, {__close = function() core.use_loss_scale(before) end})
  return fn(...)
end

-- From now on all backwards and steps are under this scale, until it is closed.
function Scaler:begin()
  local handle = rawget(self, HANDLE)
  local before = core.use_loss_scale(handle)
  if before and before ~= handle then
    core.use_loss_scale(before)
    fail "amp.scaler: another one is in use; scaler:close() ends that"
  end
  unused.scaler = true
  return self
end

-- The number of the last step that was asked about, which is not waited for.
function Scaler:asked() return rawget(self, HANDLE):asked() end

-- Of that step, if it is one of the last: its scale, its headroom, how many were skipped up to it.
function Scaler:at(number)
  local k, headroom, skipped = rawget(self, HANDLE):last(number)
  return 2.0 ^ k, headroom, skipped
end

function Scaler:close()
  local handle = rawget(self, HANDLE)
  local before = core.use_loss_scale(nil)
  if before ~= handle then core.use_loss_scale(before) end
end
meta.__close = Scaler.close

-- All of it in a flat table of numbers.
function Scaler:state() return rawget(self, HANDLE):state() end

function Scaler:load(state)
  if type(state) ~= "table" then fail("scaler:load wants a table, it is a %s", type(state)) end
  local was, is = scaler.policy_of(state), scaler.policy_of(self:state())
  if was and was ~= is then
    fail("scaler:load: the state is that of policy %s, the scaler's is %s", was, is)
  end
  rawget(self, HANDLE):load(state)
end

-- The policy's name in a state; nil if there is none.
function scaler.policy_of(state)
  local index = math.tointeger(state.policy)
  return index and core.policies[index + 1]
end

return scaler
