-- test_amp.lua - mixed precision: dtypes of results and gradients, and training in bf16.
-- test_scaler.lua trains in fp16; tests/amp/test_policies.c tests the policy of each op.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local folder = T.folder

local function half(x) return x:cast "bf16" end

-- ==== Ops ========================================================================================

T.test("fp16 sums in f32 and rounds the result", function()
  local function product(a, b) return lt.autocast("fp16", lt.matmul, a, b):item() end
  local function of(value) return lt.tensor{{value}} end
  T.equal(product(lt.ones{1, 4099}, lt.ones{4099, 1}), 4100.0)     -- in f16, 2048 + 1 is 2048
  T.equal(product(of(2.0 ^ -13), of(2.0 ^ -11)), 2.0 ^ -24)        -- the smallest
  T.equal(product(of(2.0 ^ -13), of(2.0 ^ -12)), 0.0)
  T.equal(product(of(255.0), of(256.0)), 65280.0)
  T.equal(product(of(256.0), of(256.0)), math.huge)
  T.equal(product(lt.tensor{{256.0, 256.0}}, lt.tensor{{256.0}, {-255.0}}), 256.0)
end)

T.test("other dtypes", function()
  local m = lt.ones({2, 2})
  local m16, m64 = m:cast "f16", m:cast "f64"
  lt.autocast("bf16", function()
    T.equal(lt.matmul(m16, m).dtype, "bf16")
    T.equal((m16 + half(m)).dtype, "f32")                -- neither half dtype includes the other
    T.equal((half(m) * 3).dtype, "bf16")                 -- a number gets the tensor's dtype
    T.equal(lt.linear(m64, m64).dtype, "f64")
    T.equal(m64:sum().dtype, "f64")
    T.equal(nn.linear{2, 2}:to "f64"(m64).dtype, "f64")
    T.fails(function() return m64 + m end,
            "add: x is f64, y is f32; cast one of them, e.g. y to f64")
  end)
end)

T.test("lt.autocast is a scope", function()
  local m = lt.ones({2, 2})
  local function now() return lt.matmul(m, m).dtype end
  T.equal(now(), "f32")
  local a, b = lt.autocast("bf16", function(x, y)
    T.equal(now(), "bf16")
    T.equal(lt.autocast("off", now), "f32")
    T.equal(now(), "bf16")
    pcall(lt.autocast, "off", error)
    T.equal(lt.step(now), "bf16")
    return x, y
  end, 7, m)
  assert(a == 7 and b == m)
  T.equal(now(), "f32")
  T.fails(function() lt.autocast("bf16", function() error "why" end) end, "why")
  T.equal(now(), "f32")
  lt.step(function() pcall(coroutine.wrap(function() lt.autocast("bf16", error) end)) end)
  T.equal(now(), "f32")
  for _, word in ipairs{"f16", 16} do
    T.fails(function() lt.autocast(word, now) end,
            ("lt.autocast: precision must be 'off', 'bf16' or 'fp16', but is %s")
            :format(word == 16 and 16 or "'f16'"))
  end
  T.fails(function() lt.autocast("bf16") end, "lt.autocast requires a function, but got nil")
end)

-- ==== Gradients ==================================================================================

-- Returns the largest difference of two tensors, relative to the largest number of the second.
local function distance(a, b)
  return (a - b):abs():max():item() / b:abs():max():item()
end

-- The forward pass with the casts of the policy written out.
local function by_hand(net, x)
  local conv, bn, fc = net[1], net[2], net[5]
  local y = lt.conv2d(half(x), half(conv.w), half(conv.b), {pad = 1})
  y = lt.batch_norm(y, bn.scale, bn.shift, bn.mean, bn.var, {train = true})
  y = y:relu():reshape({x:dim(1), -1})
  return lt.linear(y, half(fc.w), half(fc.b)):cast "f32"
end

T.test("gradients are in f32 and equal those of explicit casts", function()
  local net = nn.sequential{nn.conv2d{3, 8, 3, pad = 1}, nn.batch_norm{8}, nn.relu(), nn.flatten(),
                            nn.linear{128, 10}}
  local x, y = lt.randn({6, 4, 4, 3}), lt.tensor({0, 9, 3, 5, 5, 1}, {dtype = "i64"})
  local wanted = {}
  net(x)
  local logits = by_hand(net, x)
  local loss = lt.cross_entropy(logits, y)
  loss:backward()
  for name, p in net:named_parameters() do
    wanted[name] = p.grad:cast("f64"):cast "f32"
    p:zero_grad()
  end
  lt.autocast("bf16", function()
    local own = net(x)
    T.equal(own.dtype, "bf16")
    T.near(distance(own:cast "f32", logits), 0, 1e-2)
    local own_loss = lt.cross_entropy(own, y)
    T.equal(own_loss.dtype, "f32")
    T.near(own_loss:item(), loss:item(), 1e-2)
    own_loss:backward()
  end)
  for name, p in net:named_parameters() do
    T.equal(p.grad.dtype, "f32")
    if name ~= "1.b" then                      -- only rounding errors, as a batch norm follows
      assert(distance(p.grad, wanted[name]) < 1e-2, name)
    end
    local rounded = lt.eq(half(p.grad):cast "f32", p.grad):cast("f32"):mean():item()
    assert(#p.shape == 1 or rounded < 0.1, name .. " has a half-precision gradient")
  end
end)

T.test("gradients accumulate in f32, and a parameter may be both inputs", function()
  local fc = nn.linear{4, 4, bias = false}
  fc(lt.ones({1, 4}))
  local w, ones = fc.w, lt.ones({1, 4})
  -- bf16 cannot represent 256 + 1.
  lt.autocast("bf16", function()
    fc(ones * 256):sum():backward()
    fc(ones):sum():backward()
  end)
  T.equal(w.grad:totable()[1], {257.0, 257.0, 257.0, 257.0})
  w:zero_grad()
  w:copy(lt.tensor({{1, 2, 0, 0}, {3, 4, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}}))
  lt.autocast("bf16", lt.matmul, w, w):sum():backward()
  local got = w.grad:totable()
  w:zero_grad()
  lt.matmul(w, w):sum():backward()
  T.equal(got, w.grad:totable())
end)

T.test("weights that change between forward and backward are an error", function()
  local fc = nn.linear{2, 2}
  local sgd = lt.optim.sgd(fc, {lr = 0.1})
  local x = lt.ones({1, 2}):requires_grad()
  local function forward() return lt.autocast("bf16", lt.linear, x, fc.w, fc.b):sum() end
  local early = forward()
  forward():backward()
  sgd:step()
  T.raises("backward of linear: its input 2 was changed in place", early.backward, early)
  forward():backward()
end)

T.test("a step of the optimizer is the same under autocast", function()
  local sums = {}
  for i, word in ipairs{"off", "bf16"} do
    local net = nn.sequential{nn.linear{3, 3}, nn.batch_norm{3}}
    for _, p in ipairs(net:parameters()) do p:fill(0.1) end
    local adam = lt.optim.adam(net, {lr = 0.01, clip = 1})
    for _ = 1, 2 do
      local x, slope = lt.tensor({{1, 2, 3}, {4, 5, 7}}), lt.tensor({{1, 2, 3}, {-1, 1, 2}})
      local loss = (net(x) * slope):sum()
      loss:backward()
      lt.autocast(word, adam.step, adam)
    end
    sums[i] = net:sha256()
  end
  T.equal(sums[2], sums[1])
end)

-- ==== Training ===================================================================================

local function block(c)
  return nn.module({conv = nn.conv2d{c, c, 3, pad = 1, bias = false}, bn = nn.batch_norm{c}},
                   function(self, x) return lt.relu(self.bn(self.conv(x)) + x) end, "block")
end

-- Returns a net with the same weights each time.
local function make_net()
  local net = nn.sequential{nn.conv2d{1, 8, 3, pad = 1, bias = false}, nn.batch_norm{8}, nn.relu(),
                            block(8), nn.max_pool2d{2}, block(8), nn.global_avg_pool2d(),
                            nn.linear{8, 4}}
  for _, p in ipairs(net:parameters()) do
    local values = {}
    for i = 1, p:count() do values[i] = 0.5 * math.sin(1.7 * i) end
    if #p.shape == 1 then p:fill(1) else p:copy(lt.tensor(values)) end
  end
  return net
end

-- Returns a set of images with a bright column that depends on the class.
local function make_set(n)
  local x, labels = lt.randn({n, 8, 8, 1}), {}
  for i = 1, n do
    labels[i] = i % 4
    for row = 1, 8 do x:set(i, row, 2 * labels[i] + 1, 1, 2) end
  end
  return lt.data.set{images = x, labels = lt.tensor(labels, {dtype = "i64"}), classes = 4}
end

local train, test = make_set(96), make_set(32)

-- Trains for a few epochs, with the settings in `more`. Returns the net, the report and the error.
local function fit(out, more)
  local net = make_net()
  local o = {net = net, train = train, test = test, epochs = 8, batch = 16, out = out,
             optim = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9, nesterov = true})}
  for key, value in pairs(more or {}) do o[key] = value end
  local ok, result = pcall(lt.fit, o)
  return net, ok and result, not ok and result
end

local whole = folder()
local whole_net, whole_result = fit(whole, {amp = "bf16"})

T.test("a net trains in bf16 as in f32", function()
  local out, dtypes = folder(), {}
  local function loss(logits, y)
    dtypes[#dtypes + 1] = logits.dtype
    return lt.cross_entropy(logits, y)
  end
  local _, f32 = fit(out)
  assert(f32.train_loss < 0.5 and f32.top1 > 0.8, f32.train_loss)
  assert(math.abs(whole_result.train_loss / f32.train_loss - 1) < 0.03, whole_result.train_loss)
  assert(math.abs(whole_result.loss / f32.loss - 1) < 0.1, whole_result.loss)
  assert(whole_result.train_loss ~= f32.train_loss)
  assert(T.read(whole .. "/metrics.jsonl"):find '^{"event":"start",.*"amp":"bf16"')
  assert(T.read(out .. "/metrics.jsonl"):find '^{"event":"start",.*"amp":"off"')
  fit(folder(), {amp = "bf16", loss = loss, epochs = 1, accumulate = 2})
  T.equal(#dtypes, 2 * 6 + 4)
  for _, dtype in ipairs(dtypes) do T.equal(dtype, "bf16") end
end)

T.test("a resumed run in bf16 is bit-identical", function()
  local out = folder()
  for _, step in ipairs{5, 18} do fit(out, {amp = "bf16", max_steps = step}) end
  local net, result, err = fit(out, {amp = "bf16"})
  assert(result, err)
  T.equal(net:sha256(), whole_net:sha256())
  T.equal(result, whole_result)
  assert(not T.read(out .. "/metrics.jsonl"):find '"event":"warn"')
end)

T.test("a run resumed in another precision warns", function()
  local out = folder()
  fit(out, {max_steps = 3})
  fit(out, {max_steps = 5, amp = "bf16"})
  local text = '00003.safetensors was made with amp off, but now it is bf16"'
  assert(T.read(out .. "/metrics.jsonl"):find(text, 1, true))
end)

T.test("the option amp overrides lt.autocast", function()
  local function amp_of(more)
    local out = folder()
    fit(out, more)
    return T.read(out .. "/metrics.jsonl"):match '"amp":"(%w+)"'
  end
  T.equal(lt.autocast("bf16", amp_of, {max_steps = 1}), "bf16")
  T.equal(lt.autocast("bf16", amp_of, {max_steps = 1, amp = "off"}), "off")
  T.equal(lt.autocast("fp16", amp_of, {max_steps = 1}), "fp16")
  T.fails(function() lt.fit{amp = "half"} end,
          "lt.fit: 'amp' must be 'off', 'bf16', 'fp16' or 'auto', but is 'half'")
end)

T.test("a training loop without lt.run", function()
  local net, losses = make_net(), {}
  local sgd = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9})
  for epoch = 1, 4 do
    for x, y in train:batches{batch = 32, epoch = epoch} do
      losses[#losses + 1] = lt.step(lt.autocast, "bf16", function()
        local loss = lt.cross_entropy(net(x), y)
        loss:backward()
        sgd:step()
        return loss:item()
      end)
    end
  end
  assert(losses[#losses] < losses[1] / 2, losses[#losses])
end)

T.test("a batch norm adds a residual of another dtype", function()
  local net = nn.residual{body = nn.sequential{nn.linear{3, 3}, nn.batch_norm{3}}}
  local x = lt.randn{4, 3}
  lt.autocast("bf16", function()
    local y = net(x)
    T.equal(y.dtype, "bf16")
    T.near(distance(y:cast "f32", net.body(x):cast "f32" + x), 0, 1e-2)
  end)
end)

T.test("the summary counts activations kept in half precision", function()
  local net = nn.sequential{nn.conv2d{2, 4, 3, pad = 1}, nn.relu(), nn.flatten(), nn.linear{64, 5}}
  local function kept(text) return text:match "forward, ([%d.]+ %a+) kept" end
  -- For 10 images: the input, 10*4*4*2, and the output of relu, 10*4*4*4, which linear keeps as
  -- well.
  T.equal(kept(lt.summary(net, {10, 4, 4, 2})), "3.84 KB")
  T.equal(kept(lt.autocast("bf16", lt.step, function() return lt.summary(net, {10, 4, 4, 2}) end)),
          "1.92 KB")
end)

-- ==== A closed scaler ============================================================================

T.test("a gradient is checked by the scaler that scaled it", function()
  local fc = nn.linear{4, 2}
  local sgd = lt.optim.sgd(fc, {lr = 0.1})
  local scaler = lt.amp.scaler{}
  local function go(factor) (fc(lt.ones{1, 4}):sum() * factor):backward() end
  go(1e35)
  sgd:zero_grad()                                             -- drops the statistics, too
  go(1)
  T.equal(sgd:step(), "applied")
  go(1e35)
  scaler:close()
  T.fails(function() sgd:step() end,
          "an optimizer step cannot use gradients of a loss scale that is no longer in use; close "
          .. "the scale after the step, or discard the gradients with zero_grad")
  sgd:zero_grad()
  go(1)
  T.equal(sgd:step(), "applied")
  local another <close> = lt.amp.scaler{}
  go(1)
  T.equal(sgd:step(), "applied")
  T.equal(another.skipped, 0)
end)

-- ==== auto =======================================================================================

-- Runs a trial whose steps take `off` and `bf16` seconds, except the first ones, which take longer.
-- Returns the result, the number of steps and the log line.
local function run_trial(off, bf16)
  local t, steps = require "luatrain.train.trial".begin{amp = "auto"}, 0
  repeat
    local seconds = t:precision() == "bf16" and bf16 or off
    steps = steps + 1
    local result, text = t:end_step(steps > 4 and seconds or steps % 2 * 100 + 1)
    if result then return result, steps, text end
  until steps == 100
end

T.test("a trial of precisions keeps the faster one", function()
  local result, steps, text = run_trial(2.0, 1.0)
  T.equal(result, {amp = "bf16", off_ms = 2000.0, bf16_ms = 1000.0})
  T.equal(steps, 14)
  T.equal(text, "amp auto: bf16; a step takes 2000 ms in f32 and 1000 in bf16")
  T.equal(run_trial(1.0, 2.0).amp, "off")
  T.equal(run_trial(0.1, 0.096).amp, "off")                -- too small a gain
  T.equal(run_trial(0.1, 0.094).amp, "bf16")
end)

T.test("a run in amp auto", function()
  local out = folder()
  fit(out, {amp = "auto", max_steps = 5})
  assert(not T.read(out .. "/metrics.jsonl"):find '"event":"amp"')
  fit(out, {amp = "auto", max_steps = 20})               -- the trial starts over
  local text = T.read(out .. "/metrics.jsonl")
  assert(text:find '^{"event":"start",.*"amp":"auto"')
  local choice, off, bf16 = text:match('"event":"amp","t":[%d.e-]+,"amp":"(%w+)",'
                                       .. '"bf16_ms":([%d.]+),"off_ms":([%d.]+)}')
  assert(choice == "off" or choice == "bf16", text)
  assert(tonumber(off) > 0 and tonumber(bf16) > 0)
  fit(out, {amp = "auto", max_steps = 21})               -- and its choice is kept
  text = T.read(out .. "/metrics.jsonl")
  T.equal(select(2, text:gsub('"event":"amp"', "")), 1)
  T.equal(text:match '.*"event":"start",[^\n]*"amp":"(%w+)"', choice)
  assert(not text:find "was made with amp")
end)

T.finish()
