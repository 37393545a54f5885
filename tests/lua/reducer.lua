-- reducer.lua - averages the gradients of replicas of a net, with nothing but on_grad: an example
-- of hooks.
--
--   local reduce = require "reducer"{net_a, net_b}
--   loss_a:backward()
--   loss_b:backward()                         -- from here on both hold the mean of the gradients
--
-- The replicas live in one process and go backward one after the other. A parameter's gradients
-- are averaged at the moment when the last of them is complete; the real reducer sends buckets of
-- them at that moment instead.
require "luatrain"

return function(nets)
  local came = {}                            -- by name: the gradients that have come in this step
  local function ready(name, i, grad)
    came[name] = came[name] or {}
    came[name][i] = grad
    if #came[name] < #nets then return end
    local sum = came[name][1]
    for k = 2, #nets do sum = sum + came[name][k] end
    local mean = sum / #nets
    for _, g in ipairs(came[name]) do g:copy(mean) end
    came[name] = nil
  end
  for i, net in ipairs(nets) do
    for name, p in net:named_parameters() do
      p:on_grad(function(grad) ready(name, i, grad) end)
    end
  end
end
