-- reducer.lua - averages the gradients of replicas of a net, using only on_grad: an example of
-- hooks.
--
--   local reduce = require "reducer"{net_a, net_b}
--   loss_a:backward()
--   loss_b:backward()                         -- now both have the mean of the gradients
--
-- The replicas are in one process and run backward one after the other. The gradients of a
-- parameter are averaged when the last of them is complete. The real reducer then sends buckets
-- instead.
require "luatrain"

return function(nets)
  local complete = {}                        -- by name: the gradients completed in this step
  local function ready(name, i, grad)
    complete[name] = complete[name] or {}
    complete[name][i] = grad
    if #complete[name] < #nets then return end
    local sum = complete[name][1]
    for k = 2, #nets do sum = sum + complete[name][k] end
    local mean = sum / #nets
    for _, g in ipairs(complete[name]) do g:copy(mean) end
    complete[name] = nil
  end
  for i, net in ipairs(nets) do
    for name, p in net:named_parameters() do
      p:on_grad(function(grad) ready(name, i, grad) end)
    end
  end
end
