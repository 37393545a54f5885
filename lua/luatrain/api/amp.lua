-- amp.lua - lt.amp: the loss scaler that a custom fp16 training loop needs besides lt.autocast.
-- lt.fit and lt.run make their own.
--
--   local scaler <close> = lt.amp.scaler{}
--   lt.step(lt.autocast, "fp16", function()
--     local loss = lt.cross_entropy(net(x), y)
--     loss:backward()                    -- scales the loss, and unscales the gradients at the end
--     if sgd:step() == "skipped" then print(scaler.skipped, scaler.scale) end
--   end)

local amp_check = require "luatrain.api.amp_check"
local check = require "luatrain.check"
local scaler = require "luatrain.api.scaler"

local amp = {}

-- Creates a loss scaler and enables it until it is closed. Options: policy = "adaptive" (the
-- default), "dynamic" or "static"; scale = 65536, the initial scale; growth_interval = 2000, in
-- steps, for dynamic only. amp/amp.h describes the policies.
function amp.scaler(options)
  return scaler.new(options):begin()
end

-- Measures the error that half precision causes in one pass. fn runs a forward and a backward pass
-- under lt.autocast, as the function of a step does. Returns a table of errors, underflow and
-- overflow per layer, described in amp_check.lua. Has no effect on training.
--
--   local found = lt.amp.check(lt.autocast, "fp16", function()
--     lt.cross_entropy(net(x), y):backward()
--   end)
function amp.check(fn, ...) return (amp_check.check(fn, ...)) end

return check.strict(amp, "lt.amp")
