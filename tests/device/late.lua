-- late.lua - trainings for test_late.c, which runs them on the emulated accelerator and on the CPU:
-- what they return is a text that is to be the same.

local lt = require "luatrain"
local nn = lt.nn

local late = {}

local function words(list) return table.concat(list, " ") end

local function state_text(scaler)
  local list = {}
  for key, value in pairs(scaler:state()) do list[#list + 1] = ("%s=%a"):format(key, value) end
  table.sort(list)
  return words(list)
end

local function make_net()
  return nn.sequential{nn.conv2d{1, 4, 3, pad = 1}, nn.batch_norm{4}, nn.relu(), nn.flatten(),
                       nn.linear{64, 3}}
end

local labels = {0, 1, 2, 0, 1, 2}

-- Steps of a loop. o.spikes, o.nans: whether step t is to overflow, or its loss to be NaN, which
-- ends the loop; o.drops: whether gradients that overflow come and are dropped before it;
-- o.accumulate: backwards in a step; o.curious: the scaler is asked after each step; o.norms: the
-- optimizer clips, for which it waits; o.leaf: the images get gradients too, which nobody forgets;
-- o.extra: a layer that only what is dropped goes through.
function late.loop(o)
  lt.seed(4)
  local net = make_net()
  local extra = o.extra and nn.linear{16, 1}
  local trained = extra and {{params = net}, {params = extra}} or net
  local optim = o.adam and lt.optim.adam(trained, {lr = 0.01})
                or lt.optim.sgd(trained, {lr = 0.05, momentum = 0.9, clip = o.norms and 1 or nil})
  local scaler = o.policy and lt.amp.scaler{policy = o.policy, scale = o.scale or 256}
  local x = lt.randn{6, 4, 4, 1}
  local y = lt.tensor(labels, {dtype = "i64"})
  local text = {}
  local function go(factor)
    local loss = lt.cross_entropy(net(x), y) * factor
    if o.leaf then loss = loss + (x * factor):sum() end
    loss:backward()
  end
  local function step(t)
    if o.drops and o.drops[t] then
      if extra then
        (extra(x:reshape{6, 16}):sum() * 2.0 ^ 120):backward()
      else
        go(2.0 ^ 120)
      end
      optim:zero_grad()
    end
    for part = 1, o.accumulate or 1 do
      local spike = o.spikes and o.spikes[t] and part == 1
      go(o.nans and o.nans[t] and 0 / 0 or spike and 2.0 ^ 120 or 1 / t)
    end
    if o.look then text[#text + 1] = ("%a"):format(net[5].w.grad:abs():sum():item()) end
    optim:step()
    if o.curious then text[#text + 1] = ("%a %d"):format(scaler.scale, scaler.skipped) end
    if o.leaf then text[#text + 1] = ("%a"):format(x.grad:sum():item()) end
  end
  if o.leaf then x:requires_grad() end
  local ok, why = pcall(function()
    for t = 1, o.steps or 6 do lt.step(lt.autocast, o.amp or "fp16", step, t) end
    net:eval()               -- whoever looks hears of the last step too
  end)
  text[#text + 1] = ok and "done" or tostring(why)
  text[#text + 1] = net:sha256()
  if scaler then
    text[#text + 1] = state_text(scaler)
    scaler:close()
  end
  for name, slot in pairs(optim:state()) do
    if name == "steps" then text[#text + 1] = "steps " .. slot:item() end
  end
  return table.concat(text, "\n")
end

-- Who looks at running statistics before the next backward hears of a loss first, and they have
-- nothing of its batch.
function late.look()
  lt.seed(4)
  local net = make_net()
  local y = lt.tensor(labels, {dtype = "i64"})
  local ok, why = pcall(function()
    local loss = lt.cross_entropy(net(lt.randn{6, 4, 4, 1}), y) * (0 / 0)
    loss:backward() net:zero_grad() net:eval()
  end)
  net:zero_grad()
  net:eval()
  return ("%s %s\n%s"):format(ok, why, net:sha256())
end

return late
