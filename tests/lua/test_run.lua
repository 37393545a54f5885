-- test_run.lua - backward, hooks, scopes, no_grad, grad_check, and the lines that errors name.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

T.test("backward", function()
  local x = lt.tensor({1, 2, 3}):requires_grad()
  local y = (x * x):sum()
  assert(x.on_tape and y.on_tape and x.grad == nil)
  y:backward()
  T.equal(x.grad:totable(), {2.0, 4.0, 6.0})
  y = x * 2
  y:backward(lt.tensor({1, 10, 100}))
  T.equal(x.grad:totable(), {4.0, 24.0, 206.0})
  x:zero_grad()
  assert(x.grad == nil)
  x:requires_grad(false)
  assert(not (x * 2).on_tape)
end)

T.test("invalid calls of backward", function()
  local x = lt.tensor({1, 2}):requires_grad()
  T.fails(function() (x * 2):backward() end,
          "backward: the loss must have one element, but is 2 f32; "
          .. "take its mean or sum, or pass a gradient")
  T.fails(function() lt.ones({1}):backward() end,
          "backward: the loss was not computed from anything that requires a gradient")
  local y = (x * x):sum()
  y:backward()
  T.fails(function() y:backward() end,
          "backward: this graph was freed by an earlier backward or at the end of its step; "
          .. "add the losses and call backward once")
  T.fails(function() lt.ones({2}, {dtype = "i64"}):requires_grad() end,
          "only float tensors can have gradients, but this one is i64")
end)

T.test("an error in backward names the line of the op", function()
  local x = lt.tensor({1, 2}):requires_grad()
  local w = lt.tensor({3, 4}):requires_grad()
  local line = debug.getinfo(1, "l").currentline + 1
  local y = (x * w):sum()
  w:fill(0)
  T.equal({pcall(y.backward, y)},
          {false, ("tests/lua/test_run.lua:%d: backward of mul: its input 2 was changed in place "
                   .. "after it was used"):format(line)})
end)

T.test("nan in the loss names the step", function()
  local x = lt.tensor({0}):requires_grad()
  local loss = (x / x):sum()
  T.fails(function() loss:backward() end,
          ("the loss is nan at step %d; check the learning rate and the data")
          :format(lt.steps() + 1))
end)

T.test("detach and no_grad", function()
  local x = lt.tensor({2}):requires_grad()
  local y = x:detach()
  assert(not y.on_tape)
  T.equal(y:totable(), {2.0})
  local a, b = lt.no_grad(function(v, w) return v * w, 7 end, x, 3)
  assert(not a.on_tape)
  T.equal(a:totable(), {6.0})
  T.equal(b, 7)
  pcall(lt.no_grad, error)
  assert((x * 2).on_tape, "recording resumes after an error")
  local net = lt.nn.linear{2, 3}                 -- a module can be called like a function
  T.equal(lt.no_grad(net, lt.ones{1, 2}).on_tape, false)
  T.equal(lt.autocast("bf16", net, lt.ones{1, 2}).dtype, "bf16")
  T.fails(function() lt.no_grad({}) end, "lt.no_grad requires a function, but got a table")
  T.fails(function() lt.no_grad(5) end, "lt.no_grad requires a function, but got 5")
end)

T.test("hooks", function()
  local x = lt.tensor({1, 2}):requires_grad()
  local seen = {}
  x:on_grad(function(g) seen[#seen + 1] = g:totable() end)
  x:on_grad(function(g) g:copy(g * 10) end)
  local y = x * 3
  (y + x):sum():backward()
  T.equal(seen, {{4.0, 4.0}})
  T.equal(x.grad:totable(), {40.0, 40.0})
  T.fails(function() x:on_grad(5) end, "on_grad: the hook must be a function, but is 5")
end)

T.test("an error in a hook propagates from backward", function()
  local x = lt.tensor({1, 2}):requires_grad()
  local line
  x:on_grad(function(g)
    line = debug.getinfo(1, "l").currentline + 1
    return g + lt.ones({3})
  end)
  local ok, why = pcall(function() x:sum():backward() end)
  assert(not ok)
  T.equal(why, ("tests/lua/test_run.lua:%d: add: x is 2 f32 and y is 3 f32, which do not "
                .. "broadcast: axis 1 from the end has 2 and 3"):format(line))
  x:on_grad(function() error({}) end)
  assert(not pcall(function() x:sum():backward() end))
end)

T.test("a hook that registers itself is called again at the next backward", function()
  local x = lt.tensor({1, 2}):requires_grad()
  local calls = 0
  local function again()
    calls = calls + 1
    assert(calls < 4000, "it is called forever")
    x:on_grad(again)
  end
  x:on_grad(again)
  x:sum():backward()
  T.equal(calls, 1)
  x:sum():backward()
  T.equal(calls, 3)
  T.raises("on_grad: this tensor already has the maximum of 1000 hooks; a hook that registers "
           .. "itself doubles their number in every backward", function()
    while true do x:sum():backward() end
  end)
  local y = lt.tensor({1, 2}):requires_grad()
  y:on_grad(function() y:sum():backward() end)
  T.raises("backward: called from a hook of a running backward", function()
    y:sum():backward()
  end)
end)

T.test("a hook may use coroutines", function()
  local x = lt.tensor({1, 2}):requires_grad()
  local sums = {}
  for i = 1, 2 do
    x:on_grad(function(g) sums[i] = coroutine.wrap(function() return g:sum():item() end)() end)
  end
  coroutine.wrap(function() (x * x):sum():backward() end)()
  collectgarbage()
  T.equal(sums, {6.0, 6.0})
end)

T.test("a step frees its temporaries but keeps its results", function()
  local kept, dead
  local y, t = lt.step(function(a)
    dead = a * 2
    kept = (a * 3):keep()
    return dead + 1, {inner = dead + 2, n = 5}
  end, lt.tensor({1}))
  T.equal(y:totable(), {3.0})
  T.equal(t.inner:totable(), {4.0})
  T.equal(t.n, 5)
  T.equal(kept:totable(), {3.0})
  T.fails(function() return dead + 1 end,
          "add: x: this tensor belongs to a step that is over; keep it within the step, with "
          .. "x:keep() or lt_keep(x)")
  T.fails(function() dead:item() end,
          "this tensor belongs to a step that is over; keep it within the step, with x:keep() or "
          .. "lt_keep(x)")
  T.equal(tostring(dead), "dead tensor 1 f32 (its step is over)")
  T.fails(function() lt.step("x") end, "lt.step requires a function, but got 'x'")
end)

T.test("steps nest and close on errors", function()
  local outside = lt.step(function()
    local outer = lt.ones({2})
    local inner = lt.step(function() return outer, outer + 1 end)
    T.equal(inner:totable(), {1.0, 1.0})
    pcall(lt.step, function() error "x" end)
    T.equal((outer + inner):totable(), {2.0, 2.0})
    return outer
  end)
  T.equal(outside:totable(), {1.0, 1.0})
  local dead
  T.fails(function() lt.step(function() dead = lt.ones({1}) error "why" end) end, "why")
  assert(tostring(dead):find "^dead")
  local live = lt.memory().live
  for _ = 1, 100 do pcall(lt.step, function() return nil .. lt.ones({1000}) end) end
  assert(lt.memory().live - live < 400 * 1000, "an error frees the tensors of its step")
end)

T.test("parameters, gradients and slots survive a step", function()
  local net = nn.sequential{nn.linear{2, 2}, nn.batch_norm{2}}
  local sgd = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9})
  for _ = 1, 3 do
    lt.step(function()
      net(lt.randn({4, 2})):sum():backward()
      sgd:step()
    end)
  end
  T.equal(net[1].w.shape, {2, 2})
  T.equal(#net[2].mean:totable(), 2)
  lt.step(function() net(lt.randn({4, 2})):sum():backward() end)
  T.equal(#net[1].w.grad:totable(), 2)
end)

T.test("grad_check", function()
  local x, w = lt.randn({2, 3}), lt.randn({4, 3})
  T.equal(lt.grad_check(function(a, b) return a:linear(b):tanh() end, {x, w}), true)
  local labels = lt.tensor({0, 2}, {dtype = "i64"})
  T.equal(lt.grad_check(lt.cross_entropy, {x, labels}), true)
  T.fails(function() lt.grad_check(function() return 5 end, {x}) end,
          "lt.grad_check: the function must return a tensor, but returned a number")
  T.fails(function() lt.grad_check(function(a) return a:dropout(0.5) end, {x}) end,
          "lt.grad_check: the function returns another value when it is called again")
  T.fails(function() lt.grad_check(x, {x}) end,
          "lt.grad_check: requires a function and a list of tensors: lt.grad_check(f, {x, w})")
end)

T.test("grad_check finds a wrong gradient", function()
  T.fails(function()
    lt.grad_check(function(a, b) return a * b + (b * b):detach() end,
                  {lt.tensor({1, 2}), lt.tensor({3, 4})})
  end, ("lt.grad_check: input 2, element (1): numeric %.9g, analytic %.9g")
       :format(7 * math.cos(1), math.cos(1)))
end)

T.test("an error of a script keeps its message", function()
  T.fails(function() local t = nil; return t.x end, "attempt to index a nil value (local 't')")
end)

T.test("scopes that a dead coroutine leaves open are closed", function()
  local co = coroutine.create(function() lt.step(function() error "x" end) end)
  coroutine.resume(co)
  co = nil
  lt.step(function()
    local a = lt.ones({2})
    collectgarbage()
    collectgarbage()
    T.equal(a:get(1), 1.0)
  end)
  co = coroutine.create(function() lt.no_grad(function() error "x" end) end)
  coroutine.resume(co)
  co = nil
  collectgarbage()
  collectgarbage()
  local p = lt.ones({2}):requires_grad()
  p:sum():backward()
  T.equal(p.grad:get(2), 1.0)
end)

T.test("a scope that fails in a coroutine is closed at once", function()
  local function dtype() return lt.matmul(lt.ones{1, 1}, lt.ones{1, 1}).dtype end
  local function dies(fn, ...)
    local co = coroutine.create(fn)
    local ok, why = coroutine.resume(co, ...)
    T.equal({ok, (why:gsub("^.*: ", ""))}, {false, "boom"})
    T.equal(coroutine.status(co), "dead")
    return co
  end
  local function boom() error "boom" end
  local p = lt.ones{2}:requires_grad()
  local function check_state()
    local y = p * 2
    y:sum():backward()
    T.equal(dtype(), "f32")
  end
  local kept = {dies(lt.autocast, "fp16", boom), dies(lt.no_grad, boom), dies(lt.step, boom)}
  check_state()
  kept[4] = dies(lt.autocast, "bf16", lt.no_grad, lt.step, boom)
  check_state()
  lt.step(lt.autocast, "bf16", function()
    local a = lt.ones{2}
    kept[5] = dies(lt.autocast, "off", lt.no_grad, lt.step, boom)
    kept[6] = coroutine.wrap(function() return pcall(lt.autocast, "off", boom) end)()
    T.equal(dtype(), "bf16")
    T.equal(a:get(1), 1.0)
  end)
  check_state()
  T.equal(p.grad:get(1), 6.0)
  -- A coroutine that continues keeps its state; it must not yield out of a step.
  local co = coroutine.wrap(function()
    local ok, why = pcall(lt.step, coroutine.yield)
    coroutine.yield(ok, why, dtype(), lt.autocast("bf16", dtype))
    return select("#", lt.no_grad(function(...) return ... end, nil, nil, 3))
  end)
  T.equal({co()}, {false, "attempt to yield across a C-call boundary", "f32", "bf16"})
  T.equal(co(), 3)
end)

T.test("integers are exact", function()
  T.equal(lt.tensor({1e30}):cast("i64"):item(), math.maxinteger)
  T.equal((lt.tensor({1 << 53}, {dtype = "i64"}) + 1):item(), (1 << 53) + 1)
end)

-- ==== Functions of the C core that only the embedded files can access ============================

local core = T.core()

T.test("draws are counted and can continue from any number", function()
  local first = core.draws()
  local a = lt.randn({3}):totable()
  local b = lt.randn({3}):totable()
  T.equal(core.draws(), first + 2)
  core.set_draws(first)
  T.equal(lt.randn({3}):totable(), a)
  T.equal(lt.randn({3}):totable(), b)
  T.fails(function() core.set_draws(-1) end,
          "set_draws requires a non-negative integer, but got -1")
end)

T.test("steps can continue from any number", function()
  local before = lt.steps()
  core.set_step(1234)
  T.equal(lt.steps(), 1234)
  core.set_step(before)
end)

T.test("micro-batches draw the same numbers as the whole batch", function()
  local x = lt.ones({6, 4}):requires_grad()
  core.take_micro_batch(1, 2)
  local whole = lt.dropout(lt.dropout(x)):totable()
  core.take_micro_batch(2, 2)
  core.set_first_row(4)
  local piece = lt.dropout(lt.dropout(lt.ones({2, 4}):requires_grad())):totable()
  T.equal(piece, {whole[5], whole[6]})
  core.take_micro_batch(1, 1)
end)

T.test("time in backward and in optimizers is measured", function()
  local net = nn.sequential{nn.linear{200, 200}}
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  local before = core.times()
  net(lt.ones({50, 200})):sum():backward()
  local between = core.times()
  assert(between.backward > before.backward)
  T.equal(between.optimizer, before.optimizer)
  sgd:step()
  local after = core.times()
  assert(after.optimizer > between.optimizer)
  T.equal(after.backward, between.backward)
end)

T.test("errors have exit codes", function()
  local function code(fn)
    local _, err = pcall(fn)
    return core.exit_code(err)
  end
  T.equal(code(function() core.fail("EDATA", "x") end), 4)
  T.equal(code(function() core.fail("ESTOPPED", "x") end), 75)
  T.equal(code(function() core.fail("EDONE", "x") end), 0)
  T.equal(code(function() lt.load "/nowhere" end), 5)
  T.equal(code(function() lt.ones({2}):reshape(3) end), 1)
  T.equal(code(function() error "own words" end), 1)
  T.equal(code(function() error {} end), 1)
  T.equal(code(function()
    local ok, why = pcall(core.fail, "EDATA", "inner")
    assert(not ok)
    error("outer: " .. why)
  end), 4)
end)

-- Checks that fn(make()) raises an error or returns the right result if its argument is closed
-- during the call.
local function survives(what, make, fn, read)
  local wanted, times, successor = read(fn(make())), 0, nil
  local function reuse() successor = lt.full({3, 7}, 7) end  -- takes the memory of the closed one
  for k = 1, 8 do
    local closed, ok, value = T.close_within(k, make(), fn, reuse)
    if closed then times = times + 1 end
    if ok then
      T.equal(read(value), wanted)
    else
      assert(value:find("this tensor was closed", 1, true), value)
    end
  end
  assert(times > 0, what .. " allocates nothing")
end

T.test("a finalizer may close the object that a call uses", function()
  local relu, add, y = lt.relu, lt.add, lt.ones({64, 64})
  local function ones() return lt.ones({64, 64}) end
  local function leaf()
    local x = lt.ones({2}):requires_grad()
    x:sum():backward()
    return x
  end
  local function parameter()
    local net = nn.linear{2, 2}
    net(lt.ones({1, 2}))
    return net.w
  end
  local function sum(x) return x:sum():item() end
  local function itself(value) return value end
  survives("relu", ones, relu, sum)
  survives("add", ones, function(x) return add(x, y) end, sum)
  survives("add", ones, function(x) return add(y, x) end, sum)
  survives("totable", ones, function(x) return x:totable() end, itself)
  survives("shape", ones, function(x) return x.shape end, itself)
  survives("detach", ones, function(x) return x:detach() end, sum)
  survives("grad", leaf, function(x) return x.grad end, sum)
  survives("get", ones, function(x) return select(2, pcall(x.get, x, 1, 99)) end, itself)
  survives("an optimizer", parameter, function(x) return core.new_optim("sgd_step", {x}) end, type)
end)

T.test("a hook may close the tensors that backward uses", function()
  local x <const> = lt.ones({3}):requires_grad()
  local loss, grad = x * 2, lt.ones({3})
  x:on_grad(function()
    do
      local _ <close> = loss
      local _ <close> = grad
    end
    collectgarbage()
  end)
  loss:backward(grad)
  T.equal(x.grad:totable(), {2.0, 2.0, 2.0})
  local last = lt.ones({1}):requires_grad()
  last:on_grad(function(g)
    do local _ <close> = last end
    T.equal(g:totable(), {1.0})
  end)
  last:backward()
end)

T.test("a stop request stays until it is cleared", function()
  local listener = core.listen()
  os.execute "kill -TERM $PPID; sleep 0.1"
  T.equal(core.stop_reason(), "SIGTERM")
  listener:close()
  listener:close()
  T.equal(core.stop_reason(), "SIGTERM")
  core.clear_stop()
  T.equal(core.stop_reason(), nil)
end)

T.finish()
