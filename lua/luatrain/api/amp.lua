-- amp.lua - lt.amp: what a loop of one's own in fp16 needs beside lt.autocast. lt.fit and lt.run
-- make a scaler themselves.
--
--   local scaler <close> = lt.amp.scaler{}
--   lt.step(lt.autocast, "fp16", function()
--     local loss = lt.cross_entropy(net(x), y)
--     loss:backward()                    -- under the scale; gradients are true when this ends
--     if sgd:step() == "skipped" then print(scaler.skipped, scaler.scale) end
--   end)

local amp_check = require "luatrain.api.amp_check"
local check = require "luatrain.check"
local scaler = require "luatrain.api.scaler"

local amp = {}

-- A loss scale that is in use until it is closed: {policy = "adaptive", "dynamic" or "static";
-- scale = 65536, the first; growth_interval = 2000, of dynamic}. amp/amp.h says what they do.
function amp.scaler(options)
  return scaler.new(options):begin()
end

-- What half precision does to one pass: fn goes forward and backward, as the function of a step
-- does, under lt.autocast. Returns a table of errors and shares of underflow and overflow, layer by
-- layer; amp_check.lua says which. The training does not change by it.
--
--   local found = lt.amp.check(lt.autocast, "fp16", function()
--     lt.cross_entropy(net(x), y):backward()
--   end)
function amp.check(fn, ...) return (amp_check.check(fn, ...)) end

return check.strict(amp, "lt.amp")
