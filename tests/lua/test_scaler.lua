-- test_scaler.lua - training in fp16: the loss scale in loops and runs, skipped steps, checkpoints.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local folder = T.folder

-- ==== Nets and runs ==============================================================================

-- Sets the parameters to the same values each time.
local function fill(net)
  local k = 0
  for _, p in ipairs(net:parameters()) do
    local values = {}
    for i = 1, p:count() do
      k = k + 1
      values[i] = #p.shape == 1 and 0.5 or 0.3 * math.sin(1.7 * k)
    end
    p:copy(lt.tensor(values):reshape(p.shape))
  end
  return net
end

local function make_net()
  return fill(nn.sequential{
    nn.conv2d{1, 8, 3, pad = 1}, nn.batch_norm{8}, nn.relu(),
    nn.conv2d{8, 8, 3, stride = 2, pad = 1}, nn.relu(), nn.flatten(), nn.linear{128, 4}})
end

-- Batch t of 16 images. The bright column is the class.
local function make_batch(t)
  local labels, values = {}, {}
  for i = 1, 16 do
    labels[i] = (i + t) % 4
    for j = 0, 63 do
      values[#values + 1] = math.sin(i * 12.9898 + j * 78.233 + t * 3.1)
                            + (j % 8 == 2 * labels[i] and 1.5 or 0)
    end
  end
  return lt.tensor(values):reshape{16, 8, 8, 1}, lt.tensor(labels, {dtype = "i64"})
end

local function make_set(n)
  local x, y = make_batch(1)
  for t = 2, n do
    local x2, y2 = make_batch(t)
    x, y = lt.cat({x, x2}, 1), lt.cat({y, y2}, 1)
  end
  return lt.data.set{images = x, labels = y, classes = 4}
end

local train, test = make_set(6), make_set(2)

-- Trains for a few epochs, with the settings in `more`. Returns the net, the report and the error.
local function fit(out, more)
  local net = make_net()
  local o = {net = net, train = train, test = test, epochs = 6, batch = 16, out = out, amp = "fp16",
             optim = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9})}
  for key, value in pairs(more or {}) do o[key] = value end
  local ok, result = pcall(lt.fit, o)
  return net, ok and result, not ok and result
end

local events = T.events

-- Runs luatrain in a folder with LUATRAIN_FAULT=fault. Checks the exit code and that the output
-- contains a text. Returns the output.
local function run_with(fault, out, arguments, code, message)
  return T.ends(out, arguments, code, message, ("LUATRAIN_FAULT='%s'"):format(fault))
end

-- ==== Powers of two are exact ====================================================================

local function f32_run(scale, options)
  local _ <close> = scale and lt.amp.scaler{policy = "static", scale = scale} or nil
  local net = make_net()
  local make = options.adam and lt.optim.adam or lt.optim.sgd
  fit(folder(), {net = net, amp = "off", accumulate = options.accumulate, epochs = 2,
                 optim = make(net, {lr = 0.01, momentum = not options.adam and 0.9 or nil,
                                    clip = options.clip})})
  return net:sha256()
end

T.test("in f32, weights are bit-identical under each scale", function()
  for _, options in ipairs{{}, {accumulate = 3}, {clip = 0.1}, {adam = true, accumulate = 2}} do
    local wanted = f32_run(nil, options)
    for _, k in ipairs{0, 8, 16, -14, 24} do T.equal(f32_run(2.0 ^ k, options), wanted) end
  end
end)

T.test("hooks see gradients without the scale", function()
  local function grads(scale)
    local _ <close> = scale and lt.amp.scaler{policy = "static", scale = scale} or nil
    local net, seen = make_net(), {}
    for i, p in ipairs(net:parameters()) do
      p:on_grad(function(g) seen[#seen + 1] = i .. ":" .. g:abs():max():item() end)
    end
    lt.cross_entropy(net(train.images), train.labels):backward()
    return table.concat(seen, " ")
  end
  local wanted = grads(nil)
  assert(#wanted > 50)
  T.equal(grads(2.0 ^ 20), wanted)
end)

-- ==== The scaler in a loop =======================================================================

T.test("a loop without lt.run", function()
  local net, losses = make_net(), {}
  local sgd = lt.optim.sgd(net, {lr = 0.05, momentum = 0.9})
  local scaler <close> = lt.amp.scaler{}
  T.equal(scaler.scale, 65536.0)
  for t = 1, 24 do
    local x, y = make_batch(t % 6)
    losses[t] = lt.step(lt.autocast, "fp16", function()
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      T.equal(sgd:step(), "applied")
      return loss:item()
    end)
  end
  assert(losses[24] < losses[1] / 10, losses[24])
  T.equal(scaler.steps, 24)
  T.equal(scaler.skipped, 0)
  assert(scaler.last_scale <= 65536 and scaler.last_scale >= 256)
  assert(scaler.headroom > 0)
end)

T.test("without a scale, small gradients underflow in fp16", function()
  local function largest_gradient(scaler_options)
    local _ <close> = scaler_options and lt.amp.scaler(scaler_options) or nil
    local net = make_net()
    lt.autocast("fp16", function()
      local loss = lt.cross_entropy(net(train.images), train.labels) * 2.0 ^ -20
      loss:backward()
    end)
    return net:parameters()[1].grad:abs():max():item()
  end
  T.equal(largest_gradient(nil), 0.0)
  assert(largest_gradient{policy = "static"} > 0)
end)

T.test("a gradient that is not finite skips the steps of all optimizers", function()
  local net = make_net()
  local sgd = lt.optim.sgd({net[1].w, net[2].scale}, {lr = 0.05, momentum = 0.9, clip = 1})
  local adam = lt.optim.adam({net[7].w, net[7].b}, {lr = 0.01})
  local scaler <close> = lt.amp.scaler{}
  local function step(factor)
    local loss = lt.cross_entropy(net(train.images), train.labels) * factor
    loss:backward()
    return sgd:step() .. " " .. adam:step()
  end
  T.equal(step(1), "applied applied")
  local before = net:sha256()
  T.equal(step(1e35), "skipped skipped")
  T.equal(net:sha256(), before)
  T.equal(adam:state().steps:item(), 1)
  T.equal(sgd.grad_norm, 0.0)
  T.equal(scaler.skipped, 1)
  T.equal(scaler.headroom, nil)
  assert(scaler.scale < 65536)
  T.equal(step(1), "applied applied")
  assert(net:sha256() ~= before)
  T.equal(adam:state().steps:item(), 2)
end)

T.test("a scaler resumes from its state", function()
  local a <const> = lt.amp.scaler{policy = "dynamic", scale = 8, growth_interval = 2}
  local function step(factor)
    local fc = nn.linear{2, 2}
    local sgd = lt.optim.sgd(fc, {lr = 0.1})
    ;(fc(lt.ones{1, 2}):sum() * factor):backward()
    return sgd:step()
  end
  T.equal(step(1), "applied")
  local state = a:state()
  a:close()
  T.equal(state.steps, 1)
  local b <close> = lt.amp.scaler{policy = "dynamic", scale = 2, growth_interval = 9}
  b:load(state)
  T.equal(b:state(), state)
  T.equal(b.scale, 8.0)
  T.equal(step(1), "applied")
  T.equal(b.scale, 16.0)
  T.equal(step(3e38), "skipped")
  T.equal(b.scale, 8.0)
  T.equal(b:state().at_floor, 0)
  for name, values in pairs{k = {3.5, 1e6, -15, 2 ^ 40}, interval = {0}, good = {-1},
                            headroom = {10001, -10001},
                            mean = {0 / 0, -1e308}, variance = {-1.0, 1 / 0, 1e10},
                            steps = {math.maxinteger}, old_mean = {2.0},
                            in_a_row = {9}, skipped = {9}, since = {3000}, at_floor = {5}} do
    for _, value in ipairs(values) do
      local wrong = b:state()
      wrong[name] = value
      T.fails(function() b:load(wrong) end, ("'%s' of a scaler is out of range"):format(name))
    end
  end
  T.equal(b.scale, 8.0)
  state.k = nil
  T.fails(function() b:load(state) end, "scaler:load: the state has no 'k'")
  T.fails(function() b:load(7) end, "scaler:load requires a table, but got a number")
  local other = b:state()
  other.policy = 0
  T.fails(function() b:load(other) end,
          "scaler:load: the state has policy adaptive, but the scaler has policy dynamic")
end)

T.test("invalid arguments", function()
  T.fails(function() lt.amp.scaler{scale = 3} end,
          "amp.scaler: 'scale' must be a power of two from 2^-14 to 2^24, but is 3")
  for _, scale in ipairs{0, 2.0 ^ 25, 2.0 ^ -15} do
    T.fails(function() lt.amp.scaler{scale = scale} end,
            ("amp.scaler: 'scale' must be a power of two from 2^-14 to 2^24, but is %.14g")
            :format(scale))
  end
  T.fails(function() lt.amp.scaler{policy = "none"} end,
          "amp.scaler: 'policy' must be 'adaptive', 'dynamic' or 'static', but is 'none'")
  T.fails(function() return lt.amp.scale end, "lt.amp has no 'scale' (did you mean 'scaler'?)")
  local scaler <close> = lt.amp.scaler{}
  T.fails(function() lt.amp.scaler{} end,
          "amp.scaler: another scaler is in use; close it with scaler:close()")
  T.fails(function() scaler.scale = 4 end, "a scaler has no settable field 'scale'")
  T.fails(function() return scaler.scales end,
          "a scaler has no 'scales'")
  T.fails(function() lt.fit{scaler = scaler} end,
          "lt.fit: 'scaler' must be a table of options, or false, but is a luatrain.Scaler")
  scaler:close()
  scaler:close()
  local _ <close> = lt.amp.scaler{}
end)

-- ==== Runs =======================================================================================

local whole = folder()
fit(whole)

T.test("a net trains in fp16 as in f32", function()
  local results = {}
  for i, precision in ipairs{"off", "fp16"} do
    local net = make_net()
    results[i] = select(2, fit(folder(), {net = net, amp = precision, epochs = 4,
                                          optim = lt.optim.sgd(net, {lr = 0.02})}))
  end
  local f32, fp16 = table.unpack(results)
  assert(f32.train_loss < 1, f32.train_loss)
  T.near(fp16.train_loss / f32.train_loss, 1, 0.01)
  T.near(fp16.loss / f32.loss, 1, 0.01)
  assert(fp16.train_loss ~= f32.train_loss)
end)

T.test("the lines of a run's metrics have the scale", function()
  local steps = events(whole, "step")
  T.equal(#steps, 36)
  T.equal({steps[1].scale, steps[36].skipped, events(whole, "end")[1].skipped}, {65536.0, 0, 0})
  assert(steps[1].headroom >= 0)
  local out = folder()
  fit(out, {amp = "bf16", scaler = {policy = "static"}, epochs = 1})      -- fp16 only
  assert(not T.read(out .. "/metrics.jsonl"):find '"scale"')
  out = folder()
  fit(out, {scaler = {policy = "dynamic", scale = 2.0 ^ 24, growth_interval = 3}})
  steps = events(out, "step")
  T.equal({steps[1].scale, steps[1].skipped, steps[1].headroom}, {2.0 ^ 24, 1, nil})
  T.equal(steps[2].scale, 2.0 ^ 23)
  local skipped = steps[36].skipped
  assert(skipped > 3)
  T.equal(events(out, "end")[1].skipped, skipped)
  out = folder()
  fit(out, {scaler = false, epochs = 1})
  assert(not T.read(out .. "/metrics.jsonl"):find '"scale"')
end)

T.test("a run leaves no scale behind", function()
  local function grad()
    local x = lt.ones{2}:requires_grad()
    pcall(lt.autocast, "fp16", function() (x:sum() * 2.0 ^ 120):backward() end)
    return x.grad:get(1)
  end
  T.equal(grad(), 2.0 ^ 120)
  fit(folder(), {max_steps = 2})
  T.equal(grad(), 2.0 ^ 120)
  fit(folder(), {loss = function() error "stop" end})
  T.equal(grad(), 2.0 ^ 120)
end)

-- The fields scale, skipped and headroom of each step of a run.
local function scales(out)
  local list = events(out, "step")
  for i, f in ipairs(list) do list[i] = {f.scale, f.skipped, f.headroom} end
  return list
end

-- The fields of the scaler in the last checkpoint.
local function saved_scaler(out)
  local list = {}
  for name, text in pairs(select(2, lt.load(out .. "/step-00000036.safetensors"))) do
    if name:find "^scaler%." then list[#list + 1] = name .. "=" .. text end
  end
  table.sort(list)
  T.equal(#list, 14)
  return table.concat(list, " ")
end

T.test("a resumed run in fp16 is bit-identical", function()
  for _, scaler in ipairs{{}, {policy = "dynamic", scale = 2.0 ^ 24, growth_interval = 7}} do
    local one, parts = folder(), folder()
    local net = fit(one, {scaler = scaler})
    for _, step in ipairs{2, 5, 18} do fit(parts, {scaler = scaler, max_steps = step}) end
    local other, result, err = fit(parts, {scaler = scaler})
    assert(result, err)
    T.equal(other:sha256(), net:sha256())
    T.equal(scales(parts), scales(one))
    T.equal(saved_scaler(parts), saved_scaler(one))
    assert(not T.read(parts .. "/metrics.jsonl"):find '"event":"warn"')
  end
end)

T.test("a run that is resumed with other settings warns", function()
  local out = folder()
  fit(out, {max_steps = 3, amp = "off"})
  fit(out, {max_steps = 5})
  fit(out, {max_steps = 7, scaler = {policy = "static", scale = 4}})
  local text = T.read(out .. "/metrics.jsonl")
  assert(text:find('00003.safetensors was made with amp off, but now it is fp16"', 1, true))
  assert(text:find('00005.safetensors was made with scaler adaptive, but now it is static, which '
                   .. 'starts over"', 1, true))
  T.equal(events(out, "step")[6].scale, 4.0)
end)

-- ==== Faults =====================================================================================

-- A loop over 6 batches that omits step arg[2]. Prints the outcome of each step and the digest of
-- the weights.
local LOOP = [[
local lt = require "luatrain"
local nn = lt.nn
local precision, omitted, kind = arg[1], tonumber(arg[2]), arg[3]
local net = nn.sequential{nn.conv2d{1, 8, 3, pad = 1}, nn.batch_norm{8}, nn.relu(), nn.flatten(),
                          nn.linear{288, 3}}
local optim = lt.optim[kind](net, {lr = 0.01, momentum = kind == "sgd" and 0.9 or nil, clip = 1})
local scaler <close> = lt.amp.scaler{policy = "static", scale = 256}
local outcomes = {}
for t = 1, 6 do
  local x = lt.randn{12, 6, 6, 1}
  local y = lt.tensor({0, 1, 2, 0, 1, 2, 2, 1, 0, 1, 1, 0}, {dtype = "i64"})
  if t ~= omitted then
    lt.step(lt.autocast, precision, function()
      for i, j, share in lt.micro_batches(2, x, y) do
        (lt.cross_entropy(net(i), j) * share):backward()
      end
      outcomes[#outcomes + 1] = optim:step():sub(1, 1)
    end)
  end
end
print(table.concat(outcomes), net:sha256())
]]

T.test("an inf in a gradient has the effect of omitting the step", function()
  local out = folder(LOOP)
  for _, case in ipairs{{"off", "sgd"}, {"fp16", "adam"}} do
    local precision, kind = table.unpack(case)
    for _, step in ipairs(T.cases({1, 3, 6}, {3})) do
      local omit = ("--threads 1 t.lua %s %d %s"):format(precision, step, kind)
      local wanted = run_with("", out, omit, 0, ""):match "^aaaaa%s+(%x+)\n$"
      assert(wanted)
      for _, param in ipairs{"1.w", "2.shift", "5.b"} do
        local text = run_with(("inf:rank=0:step=%d:param=%s"):format(step, param), out,
                              ("--threads 1 t.lua %s 0 %s"):format(precision, kind), 0, "")
        local outcomes, got = text:match "^(%a+)%s+(%x+)\n$"
        T.equal(outcomes, ("a"):rep(step - 1) .. "s" .. ("a"):rep(6 - step))
        T.equal(got, wanted)
      end
    end
  end
end)

local FIT = [[
local lt = require "luatrain"
local train, test = lt.data.open "synthetic:6x6x1/3/96"
local net = lt.nn.sequential{lt.nn.conv2d{1, 4, 3}, lt.nn.relu(), lt.nn.flatten(),
                             lt.nn.linear{64, 3}}
lt.fit{net = net, train = train, test = test, epochs = 1, batch = 16, out = "run",
       resume = "never", schedule = lt.schedule.cosine(),
       optim = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9})}
]]

T.test("a run with a skipped step continues and reports it", function()
  local out = folder(FIT)
  local text = run_with("", out, "--amp fp16 t.lua", 0, "")
  assert(not text:find "skipped", text)
  local clean = events(out .. "/run", "step")
  run_with("inf:rank=0:step=1:param=1.w", out, "--amp fp16 t.lua", 0,
           "  lr 0.098  scale 65536 skipped 1  ")
  local steps = events(out .. "/run", "step")
  T.equal(#steps, #clean)
  for i, f in ipairs(steps) do
    T.equal({f.lr, f.samples, f.skipped}, {clean[i].lr, clean[i].samples, 1})
    assert(f.scale < 65536 or i == 1)
  end
  T.equal(events(out .. "/run", "end")[1].skipped, 1)
  -- In f32 there is no scaler to skip the step.
  run_with("inf:rank=0:step=1:param=1.w", out, "t.lua", 6, "")
end)

T.test("options of a scaler are checked in each precision", function()
  for _, precision in ipairs{"off", "bf16", "fp16", "auto"} do
    local _, _, err = fit(folder(), {amp = precision, scaler = {polcy = "static"}})
    assert(tostring(err):find("unknown key 'polcy'", 1, true), precision)
  end
end)

T.test("a fault that does not occur causes a warning", function()
  local out = folder(FIT)
  for step, message in pairs{
    [1] = false,
    [99] = "luatrain: warning: the fault of step 99 did not occur: no gradient of 1.w was computed "
           .. "in it\n"} do
    local text = run_with(("inf:rank=0:step=%d:param=1.w"):format(step), out, "--amp fp16 t.lua", 0,
                          "")
    T.equal(text:match "luatrain: warning: [^\n]*\n" or false, message)
    T.equal(#events(out .. "/run", "warn"), message and 1 or 0)
  end
end)

T.test("a fault with an unknown parameter, rank or form is an error", function()
  local out = folder(FIT)
  for fault, message in pairs{
    ["inf:rank=0:step=1:param=1.v"] = "the fault names 1.v, which is not a parameter of an "
                                      .. "optimizer",
    ["inf:rank=1:step=1:param=1.w"] = "the fault's rank 1 is out of range 0 to 0",
    ["inf:rank=0:param=1.w"] = "unknown fault 'inf:rank=0:param=1.w'",
  } do run_with(fault, out, "--amp fp16 t.lua", 2, message) end
end)

-- ==== The first tensor that is not finite ========================================================

-- WHAT is code that computes h from x, the images.
local FIRST = [[
local lt = require "luatrain"
local nn = lt.nn
local net = nn.sequential{nn.conv2d{1, 4, 3}, nn.relu(), nn.flatten(), nn.linear{64, 3}}
local sgd = lt.optim.sgd(net, {lr = 0.01})
local scaler <close> = lt.amp.scaler{policy = "dynamic", scale = 2.0 ^ -13}
local y = lt.tensor({0, 1}, {dtype = "i64"})
for t = 1, 20 do
  lt.step(lt.autocast, "fp16", function()
    local x = lt.ones{2, 6, 6, 1}
    WHAT
    lt.cross_entropy(h, y):backward()
    sgd:step()
  end)
end
print "done"
]]

T.test("an error in fp16 names the first op with a tensor that is not finite", function()
  local function ends_with(code, message, what)
    T.equal({T.run(folder((FIRST:gsub("WHAT", what))), "t.lua")}, {message .. "\n", code})
  end
  local FIRST_OF = " is the first non-finite tensor: "
  local F16 = " does not fit in f16, whose maximum is 65504; "
  local OFF = 'compute it in f32 with lt.autocast("off", ...)'
  ends_with(0, "done", "local h = net(x)")
  ends_with(6, "luatrain: t.lua:10: net.4 linear: its output" .. FIRST_OF .. "128000" .. F16
               .. OFF .. " (the loss is nan at step 1)",
            "net[4].w:copy(lt.ones{3, 64} * 100); local h = net[4](lt.ones{2, 64} * 20)")
  ends_with(6, "luatrain: t.lua:10: net.1 conv2d: its w" .. FIRST_OF .. "it is a parameter "
               .. "that contains nan before the step; check the learning rate and the loaded "
               .. "weights (the loss is nan at step 1)",
            "local w = net[1].w; w:copy(w * (0 / 0)); local h = net(x)")
  ends_with(6, "luatrain: t.lua:10: backward of cast: the gradient of its x" .. FIRST_OF
               .. "including the loss scale of 2^-14, -1.04858e+06" .. F16 .. OFF
               .. ", or try a smaller learning rate (11 steps in a row were skipped)",
            "local h = net[4](lt.zeros{2, 64}):cast 'f32' * 2.0 ^ 35")
  ends_with(6, "luatrain: t.lua:10: backward of sqrt: the gradient of its x" .. FIRST_OF
               .. "it contains -inf, in f32 as well, although all its inputs are finite; check "
               .. "the learning rate and the data, and look for a division by 0 (11 steps in a row "
               .. "were skipped)",
            "local h = net(x) * (net[1].b:sum() * 0):sqrt()")
end)

-- ==== Hard cases =================================================================================

-- Trains for n steps. The loss is multiplied by 2^12, like a sum over many pixels, and by
-- 2^(14 sin(2 pi t / 200)); the learning rate is divided by the same factor. Returns the mean loss
-- of the last 50 steps; the number of steps that changed nothing, because they were skipped or all
-- gradients became 0; and the error.
local function train_with_swings(n, options)
  local scaler <close> = options and lt.amp.scaler(options) or nil
  local net, sum, lost = make_net(), 0, 0
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  for t = 1, n do
    local x, y = make_batch(t)
    local factor = 2 ^ (12 + 14 * math.sin(2 * math.pi * t / 200))
    sgd.lr_factor = 1 / factor
    local ok, loss = pcall(lt.step, lt.autocast, options and "fp16" or "off", function()
      local loss = lt.cross_entropy(net(x), y)
      ;(loss * factor):backward()
      sgd:step()
      return loss:item()
    end)
    if not ok then return nil, lost, loss end
    if scaler and not scaler.headroom then lost = lost + 1 end
    if t > n - 50 then sum = sum + loss end
  end
  return sum / 50, lost
end

T.test("gradients that grow and shrink by 2^14", function()
  local _, _, why = train_with_swings(100, {policy = "static"})
  assert(tostring(why):find("including the loss scale of 2^16, ", 1, true), why)
  assert(tostring(why):find("(10 steps in a row were skipped)", 1, true), why)
  local _, lost = train_with_swings(100, {policy = "dynamic"})
  assert(lost > 10, lost)
  _, lost = train_with_swings(100, {})
  assert(lost <= 5, lost)
  local plain = train_with_swings(400)
  local loss, skipped = train_with_swings(400, {})
  assert(plain < 0.001, plain)
  assert(loss < 1.2 * plain, loss)
  assert(skipped < 20, skipped)
end)

T.finish()
