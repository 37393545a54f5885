-- model.lua - the model that two.c trains. Returns a function (x, labels) that takes a step and
-- returns the loss.
local lt = require "luatrain"
local nn = lt.nn

local net = nn.sequential{
  nn.conv2d{1, 8, 3, pad = 1}, nn.relu(), nn.max_pool2d{2},
  nn.dropout{0.1}, nn.flatten(), nn.linear{6 * 6 * 8, 10}}
local optim = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9})

return function(x, labels)
  return lt.step(function()
    local loss = lt.cross_entropy(net(x), labels)
    loss:backward()
    optim:step()
    return loss
  end)
end
