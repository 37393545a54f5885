-- deferred.lua - training runs for test_deferred.c and ranks.h, which run them on an emulated
-- accelerator and on the CPU. Each function returns a text that must be equal on both.

local lt = require "luatrain"
local nn = lt.nn

local deferred = {}

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

-- A training loop. o.spikes, o.nans: the steps that overflow, or whose loss is NaN, which ends the
-- loop; o.drops: the steps before which gradients overflow and are zeroed; o.accumulate: backwards
-- per step; o.inspect: read the scaler and the norm after each step; o.clips: the optimizer clips;
-- o.breaks_in: steps in which a hook makes a gradient infinite; o.leaf: the images get gradients
-- too, which are never zeroed; o.extra: the dropped gradients come through a layer that nothing
-- else uses; o.grads: read a gradient before each step. With ranks: o.rank; o.rare: only rank 0
-- uses a layer; o.breaks: backward fails in this step on rank 1; o.one: only rank 0 has the nans.
function deferred.loop(o)
  lt.seed(4)
  local net = make_net()
  local extra = (o.extra or o.rare) and nn.linear{16, 1}
  local trained = extra and {{params = net}, {params = extra}} or net
  local clip = o.clips and 1 or nil
  local optim = o.adam and lt.optim.adam(trained, {lr = 0.01, clip = clip})
                or lt.optim.sgd(trained, {lr = 0.05, momentum = 0.9, clip = clip})
  local scaler = o.policy and lt.amp.scaler{policy = o.policy, scale = o.scale or 256}
  local x = lt.randn{6, 4, 4, 1}
  local y = lt.tensor(labels, {dtype = "i64"})
  local text = {}
  if o.rank then x = x * (o.rank + 1) end
  local function backward(factor)
    local loss = lt.cross_entropy(net(x), y) * factor
    if o.rare and o.rank == 0 then loss = loss + extra(x:reshape{6, 16}):sum() * factor end
    if o.leaf then loss = loss + (x * factor):sum() end
    loss:backward()
  end
  local function step(t)
    if o.drops and o.drops[t] then
      if extra then
        (extra(x:reshape{6, 16}):sum() * 2.0 ^ 120):backward()
      else
        backward(2.0 ^ 120)
      end
      optim:zero_grad()
    end
    if o.breaks == t and o.rank == 1 then net[1].w:on_grad(function() error "broken" end) end
    for part = 1, o.accumulate or 1 do
      local spike = o.spikes and o.spikes[t] and part == 1
      local is_mine = not o.one or o.rank == 0
      backward(o.nans and o.nans[t] and is_mine and 0 / 0 or spike and 2.0 ^ 120 or 1 / t)
    end
    if o.grads then text[#text + 1] = ("%a"):format(net[5].w.grad:abs():sum():item()) end
    optim:step()
    if o.inspect and scaler then
      text[#text + 1] = ("%a %d"):format(scaler.scale, scaler.skipped)
    end
    if o.inspect and o.clips then text[#text + 1] = ("%a"):format(optim.grad_norm) end
    if o.leaf then text[#text + 1] = ("%a"):format(x.grad:sum():item()) end
  end
  if o.leaf then x:requires_grad() end
  if o.breaks_in then
    net[1].w:on_grad(function(g) g:copy(g * (o.breaks_in[lt.steps() + 1] and math.huge or 8)) end)
  end
  local ok, why = pcall(function()
    for t = 1, o.steps or 6 do lt.step(lt.autocast, o.amp or "fp16", step, t) end
    net:eval()               -- also reports an error of the last step
  end)
  text[#text + 1] = ok and "done" or tostring(why)
  text[#text + 1] = net:sha256()
  if scaler then
    text[#text + 1] = state_text(scaler)
    scaler:close()
  end
  local counts = {}
  for name, slot in pairs(optim:state()) do
    if name:find "^step" then counts[#counts + 1] = name .. " " .. slot:item() end
  end
  table.sort(counts)
  text[#text + 1] = words(counts)
  return table.concat(text, "\n")
end

-- Two optimizers; steps 2, 3, 6 and 7 overflow. In steps 2 and 6 the second optimizer steps after
-- another backward, which does not use its layer.
function deferred.two_optimizers()
  lt.seed(4)
  local first, second = nn.linear{4, 3}, nn.linear{3, 2}
  local a, b = lt.optim.sgd(first, {lr = 0.05}), lt.optim.adam(second, {lr = 0.01})
  local scaler = lt.amp.scaler{policy = "dynamic"}
  local x, text = lt.randn{6, 4}, {}
  for t = 1, 8 do
    local spike = t % 4 > 1
    ;(second(first(x)):sum() * (spike and 2.0 ^ 120 or 1)):backward()
    a:step()
    if spike and t % 2 == 0 then
      first(x):sum():backward()
      a:step()
    end
    b:step()
    text[t] = second:sha256()
  end
  text[9] = first:sha256()
  text[10] = state_text(scaler)
  scaler:close()
  return table.concat(text, "\n")
end

-- Reading running statistics before the next backward first reports a loss that is not finite. They
-- do not include its batch.
function deferred.read_statistics()
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

-- The report of lt.amp.check in the precision o.amp.
function deferred.check(o)
  lt.seed(4)
  local net, x = make_net(), lt.randn{6, 4, 4, 1}
  local result = lt.amp.check(lt.autocast, o.amp, function()
    lt.cross_entropy(net(x), lt.tensor(labels, {dtype = "i64"})):backward()
  end)
  local text = {("%a %a %a"):format(result.loss, result.loss_f32, result.underflow)}
  for _, layer in ipairs(result.layers) do
    local list = {layer.layer}
    for _, key in ipairs{"output", "input_grad", "param_grad", "underflow", "overflow"} do
      list[#list + 1] = layer[key] and ("%a"):format(layer[key]) or "-"
    end
    text[#text + 1] = words(list)
  end
  return table.concat(text, "\n")
end

-- The contents of metrics.jsonl without times.
local function metrics(folder)
  local list = {}
  for line in io.lines(folder .. "/metrics.jsonl") do
    local part = {line:match '"event":"[a-z]*"'}
    for _, key in ipairs{"step", "epoch", "samples", "loss", "lr", "scale", "skipped", "headroom",
                         "top1", "exit", "weights_sha256"} do
      part[#part + 1] = line:match(('"%s":[^,}]*'):format(key))
    end
    list[#list + 1] = words(part)
  end
  return table.concat(list, "\n")
end

-- lt.fit. o.nan: number of the step whose loss is NaN; o.each: called before each step.
function deferred.fit(o)
  lt.seed(4)
  local train, test = lt.data.open "synthetic:4x4x1/3/48"
  local net, steps = make_net(), 0
  local ok, why = pcall(lt.fit, {
    net = net, train = train, test = test, epochs = 2, batch = 8, accumulate = o.accumulate,
    optim = lt.optim.adam(net, {lr = 0.01, clip = o.clip}), out = o.out, max_steps = o.max_steps,
    mixup = o.mixup,
    resume = "auto", save_every = o.save_every, workers = o.workers, amp = o.amp,
    scaler = o.amp == "fp16" and {policy = o.policy, scale = o.scale} or nil,
    schedule = function()
      if o.each then o.each() end
      return 1
    end,
    loss = function(logits, y)
      local loss = lt.cross_entropy(logits, y)
      steps = steps + 1
      return steps == o.nan and loss * (0 / 0) or loss
    end})
  return ("%s\n%s\n%s"):format(ok and "done" or tostring(why):gsub("saved in.*", ""), net:sha256(),
                               metrics(o.out))
end

-- Steps with an optimizer that clips. A backward of the third step reports a NaN loss; o.again: its
-- optimizer steps nevertheless.
function deferred.reported(o)
  lt.seed(4)
  local net = make_net()
  local sgd = lt.optim.sgd(net, {lr = 0.05, clip = 1})
  local x, y = lt.randn{6, 4, 4, 1}, lt.tensor(labels, {dtype = "i64"})
  for t = 1, 5 do
    local ok, why = pcall(function()
      if t == 3 then (lt.cross_entropy(net(x), y) * (0 / 0)):backward() end
      lt.cross_entropy(net(x), y):backward()
      sgd:step()
    end)
    assert(ok == (t ~= 3), why)
    if not ok and o.again then assert(sgd:step() == "skipped") end
    if not ok then sgd:zero_grad() end
  end
  return net:sha256()
end

-- A loop over lt.run. o.kind: the type that run:step must return, "number" or "tensor".
function deferred.run(o)
  lt.seed(4)
  local net, train = make_net(), (lt.data.open "synthetic:4x4x1/3/48")
  local sgd = lt.optim.sgd(net, {lr = 0.05})
  local last
  do
    local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = 8,
                               out = o.out, amp = o.amp}
    for _ in run:epochs() do
      for x, y in run:batches() do
        last = run:step(function()
          local loss = lt.cross_entropy(net(x), y)
          loss:backward()
          sgd:step()
          return loss
        end)
      end
    end
  end
  local kind = type(last) == "number" and "number" or "tensor"
  if kind ~= o.kind then error("run:step returns a " .. kind) end
  return ("%a\n%s\n%s"):format(kind == "number" and last or last:item(), net:sha256(),
                               metrics(o.out))
end

return deferred
