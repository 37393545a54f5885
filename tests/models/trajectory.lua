-- trajectory.lua - trains a net from PyTorch's initial weights on PyTorch's batches and compares
-- the losses.
--
-- A fixture written by tests/oracle/make.py holds the weights, under the names that
-- fixture_name(name) returns for this net's names; 32 images with labels; and PyTorch's losses, in
-- loss.f64 and loss.f32. There is a loss for each batch of 8 before its SGD step. The last loss is
-- of all images in evaluation mode, which also tests the running statistics of batch norm.

package.path = "tests/lua/?.lua;" .. package.path
local lt = require "luatrain"
local T = require "lt_test"

local BATCH = 8

local function copy_weights(net, fixture, fixture_name)
  for name, p in net:named_parameters() do
    local key = fixture_name(name)
    if not fixture[key] then error("the fixture has no " .. key) end
    p:copy(fixture[key])
  end
end

-- Returns the losses of all steps and, last, of all images in evaluation mode.
local function train(net, fixture, dtype, lr, steps)
  local images, labels = fixture.images:cast(dtype), fixture.labels
  local sgd = lt.optim.sgd(net, {lr = lr, momentum = 0.9, weight_decay = 5e-4})
  local losses = {}
  for step = 1, steps do
    local first = (step - 1) * BATCH % #images + 1
    losses[step] = lt.step(function()
      local x = images:slice(1, first, first + BATCH - 1)
      local loss = lt.cross_entropy(net(x), labels:slice(1, first, first + BATCH - 1))
      loss:backward()
      sgd:step()
      return loss:item()
    end)
  end
  net:eval()
  losses[steps + 1] = lt.no_grad(function() return lt.cross_entropy(net(images), labels):item() end)
  return losses
end

-- Makes a test for each precision: within 1e-8 over 50 steps in f64, within 1e-4 over 10 in f32.
return function(name, make_net, lr, fixture_name)
  fixture_name = fixture_name or function(own_name) return own_name end
  local fixture = lt.load("tests/oracle/" .. name .. ".safetensors")
  for _, case in ipairs{{"f64", 1e-8}, {"f32", 1e-4}} do
    local dtype, tolerance = table.unpack(case)
    T.test(("%s in %s follows PyTorch"):format(name, dtype), function()
      local wanted = fixture["loss." .. dtype]:totable()
      local net = make_net():to(dtype)
      copy_weights(net, fixture, fixture_name)
      local losses = train(net, fixture, dtype, lr, #wanted - 1)
      local most = 0
      for i, loss in ipairs(losses) do most = math.max(most, math.abs(loss - wanted[i])) end
      print(("%s in %s: loss %.6f to %.6f, at most %.1e from PyTorch's"):format(
            name, dtype, losses[1], losses[#losses - 1], most))
      for i, loss in ipairs(losses) do T.near(loss, wanted[i], tolerance) end
    end)
  end
  T.finish()
end
