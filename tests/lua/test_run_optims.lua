-- test_run_optims.lua - the optimizers of a run and what the script switches in its net: checks,
-- leftover gradients, and what a checkpoint restores, in each mode.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local train = lt.data.open "synthetic:4x4x3/4/32"

-- A net of a body and a head.
local function make()
  local net = nn.sequential{flat = nn.flatten(), body = nn.linear{48, 6}, act = nn.relu(),
                            head = nn.linear{6, 4}}
  return net, lt.optim.sgd(net, {lr = 0.1, momentum = 0.9})
end

local function run_with(net, optim, more)
  local o = {net = net, optim = optim, train = train, epochs = 1, batch = 8, out = T.folder()}
  for key, value in pairs(more or {}) do o[key] = value end
  return lt.run(o)
end

local function close(run) run:epochs(); getmetatable(run).__close(run) end

-- ==== The start of a run =========================================================================

local function refused(net, optim, text)
  T.fails(function() run_with(net, optim) end, "lt.run: " .. text)
end

T.test("a part of the net that is replaced after the optimizer was made", function()
  local net = nn.module({body = nn.linear{48, 6}, head = nn.linear{6, 4}},
                        function(self, x) return self.head(self.body(x:reshape{x:dim(1), 48})) end)
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  net.head = nn.linear{6, 4}
  refused(net, sgd, "the optimizer has head.w, head.b, which the net does not have, and the net "
                    .. "has head.w, head.b, which no optimizer has; make the optimizer after the "
                    .. "last change of the net")
  net.head:freeze()
  refused(net, sgd, "the optimizer has head.w, head.b, which the net does not have, so the run "
                    .. "would not save them; make them part of the net")
end)

T.test("parameters outside of the net, other nets, and an optimizer that is given twice", function()
  local net, sgd = make()
  local scale = nn.module({scale = nn.parameter({3}, {value = 1})}, function(self) return self end)
  local all = nn.module({net = net, loss = scale}, function(self, x) return self.net(x) end)
  refused(net, lt.optim.sgd(all, {lr = 0.1}),
          "the optimizer has loss.scale, which the net does not have, so the run would not save "
          .. "them; make them part of the net")
  refused(net, {sgd, lt.optim.sgd(scale, {lr = 1})},
          "the optimizer has no parameter of the net; it was made for another net")
  refused(net, {sgd, sgd}, "an optimizer is given twice")
  scale:freeze()
  close(run_with(net, lt.optim.sgd(all, {lr = 0.1})))
end)

T.test("parameters that no optimizer has are told, unless they are frozen", function()
  local out, net = T.folder(), make()
  local head = lt.optim.sgd(net.head, {lr = 0.1})
  close(run_with(net, head, {out = out}))
  T.equal(T.warnings(out), {"no optimizer has body.w, body.b, so this part of the net keeps its "
                          .. "values; freeze() it if that is intended"})
  out = T.folder()
  close(run_with(net, {head, lt.optim.adam(net.body, {lr = 0.1})}, {out = out}))
  T.equal(T.warnings(out), {})
  out = T.folder()
  net.body:freeze()
  close(run_with(net, head, {out = out}))
  T.equal(T.warnings(out), {})
end)

T.test("lt.fit steps all optimizers of a list, and the schedule applies to all", function()
  local net = make()
  local list = {lt.optim.sgd(net.body, {lr = 0.1}), lt.optim.adam(net.head, {lr = 0.1})}
  local before = {net.body:sha256(), net.head:sha256()}
  lt.fit{net = net, optim = list, train = train, test = train, epochs = 1, batch = 8,
         out = T.folder(), schedule = function() return 0.25 end}
  assert(net.body:sha256() ~= before[1] and net.head:sha256() ~= before[2])
  T.equal({list[1].lr_factor, list[2].lr_factor}, {0.25, 0.25})
end)

-- ==== Gradients of other optimizers ==============================================================

T.test("an optimizer that is not in the list cannot step in the run", function()
  local net, sgd = make()
  local other = lt.optim.adam(net.head, {lr = 0.1})
  local run <close> = run_with(net, sgd)
  run:epochs()()
  local x, y = run:batches()()
  local function step() other:step() end
  lt.cross_entropy(net(x), y):backward()
  T.fails(function() run:step(function()
    other:step()
  end) end, "run:step: this optim.adam is not an optimizer of the run, which would not save it; "
            .. "make it before lt.run, and give lt.run a list of all optimizers: optim = {a, b}")
  step()                                 -- outside of run:step, it may
end)

T.test("run:step discards leftover gradients, or refuses those of an optimizer without a step",
       function()
  local net = make()
  local body, head = lt.optim.sgd(net.body, {lr = 0.1}), lt.optim.sgd(net.head, {lr = 0.1})
  local run <close> = run_with(net, {body, head})
  run:epochs()()
  local batches = run:batches()
  local function step(...)
    local x, y = batches()
    local list = {...}
    return run:step(function()
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      for _, optim in ipairs(list) do optim:step() end
      lt.cross_entropy(net(x), y):backward()
      return loss
    end)
  end
  step(body, head)
  assert(not net.body.w.grad and not net.head.w.grad)
  T.fails(function()
    step(head)
  end, "run:step: its function left gradients of an optim.sgd that took no step, and a resumed run "
       .. "would not have them; step, discard them with zero_grad(), or freeze() or detach() what "
       .. "this loss must not train")
end)

-- Functions of a script that prints what its steps of two optimizers print to stderr.
local MIXED = [[
local lt = require "luatrain"
local nn = lt.nn
local how = arg[1]
local function one(value)
  return nn.module({w = nn.parameter({1}, {value = value})}, function(self) return self.w * 1.0 end)
end
local g, d = one(2), one(3)
local of_g, of_d = lt.optim.sgd(g, {lr = 0.1}), lt.optim.adam(d, {lr = 0.1})
for i = 1, 4 do
  if how == "gan" or how == "zero" then
    d():backward()
    of_d:step();
    (g() * d()):backward()
    of_g:step()
    if how == "zero" then of_d:zero_grad() end
  elseif how == "joint" then                     -- both use the same backward passes
    (g() * d()):backward();
    (g() + d()):backward()
    of_g:step()
    of_d:step()
  elseif how == "rare" then                      -- of_d adds up the gradients of two steps of of_g
    (g() * d()):backward()
    of_g:step()
    if i % 2 == 0 then of_d:step() end
  elseif how == "probe" then                     -- of_d adds up, while of_g trains something else
    d():backward()
    g():backward()
    of_g:step()
    if i % 2 == 0 then of_d:step() end
  end
end
print "end"
]]

T.test("a step with gradients that another optimizer's loss has left is told once", function()
  local out = T.folder(MIXED)
  T.equal(T.run(out, "t.lua gan"),
          "luatrain: warning: t.lua:12: optim.adam: this step also uses leftover gradients, such "
          .. "as that of w, from a backward pass that another optimizer has already used; call "
          .. "zero_grad() of this optimizer after the step of the other, unless this is intended\n"
          .. "end\n")
  for _, how in ipairs{"zero", "joint", "rare", "probe"} do
    T.equal(how .. ": " .. T.run(out, "t.lua " .. how), how .. ": end\n")
  end
end)

-- ==== Checkpoints ================================================================================

-- A loop with two optimizers. The body is frozen in epoch 2, or until then, and a norm is in eval
-- mode from epoch 2 on. `together`: both optimizers step after one backward, else in turn.
local LOOP = [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{together = false, melts = false}
local train = lt.data.open "synthetic:4x4x3/4/32"
local net = nn.sequential{flat = nn.flatten(), body = nn.linear{48, 6}, norm = nn.group_norm{2, 6},
                          act = nn.relu(), head = nn.linear{6, 4}}
local body = lt.optim.adam({{params = net.body}, {params = net.norm, lr = 0.02}}, {lr = 0.01})
local head = lt.optim.adamw(net.head, {lr = 0.01})
if opt.melts then net.body:freeze() end
local run <close> = lt.run{net = net, optim = {body, head}, train = train, epochs = 4, batch = 8,
                           schedule = lt.schedule.linear{}}
for epoch in run:epochs() do
  if epoch == 2 then net.body:freeze(not opt.melts) end
  if epoch == 2 then head.weight_decay, body.groups[2].lr = 0.2, 0.03 end
  for x, y in run:batches() do
    run:step(function()
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      body:step()
      if opt.together then
        head:step()
      else
        head:zero_grad()                         -- of the first loss
        local other = lt.cross_entropy(net(x), y) * 0.5
        other:backward()
        head:step()
      end
      return loss
    end)
  end
end
]]

local MODES = {"", "--ranks 2", "--ranks 2 --deterministic --vranks 4 --together",
               "--ranks 2 --parallel pipe=2,micro=1,cut=head", "--amp fp16 --melts",
               "--ranks 2 --parallel pipe=2,micro=2,cut=head --together --melts"}

T.test("a resumed run with two optimizers equals the unbroken run, in each mode", function()
  local out = T.folder(LOOP)
  for i, mode in ipairs(MODES) do
    local flags = ""
    local options = mode:gsub(" ?%-%-together", function() flags = " --together" return "" end)
    options = options:gsub(" ?%-%-melts", function() flags = flags .. " --melts" return "" end)
    local function run(name, more)
      local text, code = T.run(out, ("--quiet --threads 1 --out %s%d %s %s t.lua%s"):format(
        name, i, more, options, flags))
      T.equal(code .. text:gsub("^luatrain: stopped by[^\n]*\n[^\n]*\n", ""), "0")
    end
    local function sum(name) return T.sha(("%s/%s%d"):format(out, name, i)) end
    run("whole", "")
    run("parts", "--max-steps 6")
    run("parts", "--max-steps 11")
    run("parts", "")
    T.equal(mode .. " " .. sum "parts", mode .. " " .. sum "whole")
  end
  T.ends(out, "--quiet --out a --ranks 2 --parallel async=asgd t.lua", 1,
         "t.lua:10: lt.run: asynchronous training supports one optimizer, but 'optim' has 2")
end)

-- What the body of the loop does after run:step, and not again when the run is resumed.
local AFTER = [[
local lt = require "luatrain"
local nn = lt.nn
local how = arg[1]
local train = lt.data.open "synthetic:4x4x3/4/32"
local net = nn.sequential{flat = nn.flatten(), body = nn.linear{48, 6}, act = nn.relu(),
                          drop = nn.dropout{0.5}, head = nn.linear{6, 4}}
local sgd = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9})
local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = 8}
local function train_step(x, y)
  local loss = lt.cross_entropy(net(x), y)
  loss:backward()
  sgd:step()
  return loss
end
local steps = run.steps
for _ in run:epochs() do
  for x, y in run:batches() do
    run:step(train_step, x, y)
    if run.steps > steps then                    -- in a pipeline, after the last micro-batch
      steps = run.steps
      net.body.w:copy(lt.clamp(net.body.w, -0.05, 0.05))
      if steps == 3 then net.head:freeze() end
      if steps == 6 then net.drop:eval() end
      if how == "fail" and steps == 7 then error "boom" end
      if how == "leave" and steps == 3 then break end
    end
  end
  if how == "leave" then return end
end
]]

T.test("a checkpoint has what the body of the loop does after run:step, in each mode", function()
  local out = T.folder(AFTER)
  for i, mode in ipairs{"", "--ranks 2", "--ranks 2 --deterministic --vranks 4",
                        "--ranks 2 --parallel pipe=2,micro=2,cut=head"} do
    local function run(name, more)
      return select(2, T.run(out, ("--quiet --threads 1 --out %s%d %s %s"):format(
        name, i, mode, more)))
    end
    local codes = {run("whole", "t.lua"), run("stops", "--max-steps 3 t.lua"),
                   run("stops", "--max-steps 6 t.lua"), run("stops", "t.lua"),
                   run("fails", "--save-every 3 t.lua fail"), run("fails", "t.lua")}
    local function sum(name) return T.sha(("%s/%s%d"):format(out, name, i)) end
    local whole = sum "whole"
    T.equal({mode, codes, sum "stops", sum "fails"}, {mode, {0, 0, 0, 0, 1, 0}, whole, whole})
  end
  local text, code = T.run(out, "--quiet --out left --max-steps 3 t.lua leave")
  T.equal({code, text:match "^[^\n]*"},
          {0, "luatrain: stopped by --max-steps at step 3, saved in left; resume with:"})
end)

T.test("other optimizers than those of the checkpoint are refused", function()
  local out = T.folder()
  local function train_net(makes, stop)
    local net = make()
    local list = {}
    for i, name in ipairs(makes) do
      list[i] = lt.optim[name](i == 1 and net.body or net.head, {lr = 0.1})
    end
    if #makes == 1 then net.head:freeze() end
    local _, why = pcall(lt.fit, {net = net, optim = list, train = train, test = train, epochs = 1,
                                  batch = 8, out = out, max_steps = stop})
    return why
  end
  train_net({"adam", "sgd"}, 2)
  for _, makes in ipairs{{"adam"}, {"adam", "lars"}} do
    local text = train_net(makes)
    assert(text:find(("was made with optim.adam, optim.sgd, but the script now makes optim.%s; "
                      .. "start a new run"):format(table.concat(makes, ", optim.")), 1, true), text)
  end
end)

-- Optimizers of parameters with equal shapes.
local SWAPS = [[
local lt = require "luatrain"
local nn = lt.nn
local net = nn.sequential{flat = nn.flatten(), a = nn.linear{48, 48}, b = nn.linear{48, 48}}
net(lt.zeros{1, 4, 4, 3})
local function adam(...) return lt.optim.adam(..., {lr = 0.1}) end
local optim = ({
  parts = function() return {adam(net.a), adam(net.b)} end,
  swapped = function() return {adam(net.b), adam(net.a)} end,
  groups = function() return adam{{params = net.a}, {params = net.b}} end,
  other_groups = function() return adam{{params = net.b}, {params = net.a}} end,
  list = function() return adam{net.a.w, net.b.w, net.a.b, net.b.b} end,
  other_list = function() return adam{net.b.w, net.a.w, net.a.b, net.b.b} end,
})[arg[1] ]()
lt.fit{net = net, optim = optim, epochs = 2, batch = 8, train = lt.data.open "synthetic:4x4x3/4/32",
       test = lt.data.open "synthetic:4x4x3/4/32"}
]]

T.test("optimizers of a checkpoint with other parameters in their place are refused", function()
  local out = T.folder(SWAPS)
  local function refuses(mode, first, second, one, other)
    local function run(more, which)
      return T.run(out, ("--quiet --threads 1 --out out %s %s t.lua %s"):format(mode, more, which))
    end
    T.equal(select(2, run("--resume never --max-steps 2", first)), 0)
    local text, code = run("", second)
    local wanted = ("was made with an optim.adam of %s in place 1 of 'optim', but now that "
                    .. "optimizer has %s; make the optimizers with the same parameters in the "
                    .. "same order, or start a new run with another --out"):format(one, other)
    T.equal({mode, first, code, text:match "safetensors ([^\n]*)\n$"}, {mode, first, 5, wanted})
    T.equal(select(2, run("--max-steps 3", first)), 0)
  end
  for _, mode in ipairs{"", "--ranks 2", "--ranks 2 --parallel pipe=2,micro=1,cut=b",
                        "--ranks 2 --parallel async=asgd"} do
    if not mode:find "async" then refuses(mode, "parts", "swapped", "a.w, a.b", "b.w, b.b") end
    refuses(mode, "groups", "other_groups", "a.w, a.b, b.w and 1 more", "b.w, b.b, a.w and 1 more")
    if mode == "" then
      refuses(mode, "list", "other_list", "a.w, b.w, a.b and 1 more", "b.w, a.w, a.b and 1 more")
    end
  end
end)

-- Trains with functions of the net: `first` before lt.run, `later` in the second step. Returns the
-- net and the warnings.
local function switch(out, first, later, stop)
  local net, sgd = make()
  local now, learn = nil, T.learn(net, sgd)
  first(net)
  pcall(function()
    local run <close> = run_with(net, sgd, {out = out, max_steps = stop})
    now = {net.body.w.on_tape, net.body.training, net.training}
    for _ in run:epochs() do
      for x, y in run:batches() do
        run:step(function()
          if run.steps == 1 then later(net) end
          return learn(x, y)
        end)
      end
    end
  end)
  return now, T.warnings(out)
end

local function nothing() end

T.test("frozen parameters and modes are restored, unless the script has changed them", function()
  local function off(net) net.body:freeze():eval() end
  local function on(net) net.body:freeze(false):train() end
  local out = T.folder()
  switch(out, nothing, off, 2)
  local now, told = switch(out, nothing, nothing, 3)
  T.equal({now, told}, {{false, false, true}, {}})
  out = T.folder()
  switch(out, off, on, 2)
  T.equal((switch(out, off, nothing, 3)), {true, true, true})
  out = T.folder()
  switch(out, nothing, nothing, 2)
  now, told = switch(out, off, nothing, 3)       -- the user has changed the script
  T.equal(now, {false, false, true})
  local path = out .. "/step-00000002.safetensors was made with "
  T.equal(told, {
    path .. "body in training mode, but the script now has it in eval mode, which is used",
    path .. "body.b, body.w trained, but the script now freezes them, which is used"})
  out = T.folder()
  switch(out, off, off, 2)
  now, told = switch(out, nothing, nothing, 3)
  path = out .. "/step-00000002.safetensors was made with "
  T.equal({now, told}, {{true, true, true}, {
    path .. "body.b, body.w frozen, but the script now trains them, which is used",
    path .. "body in eval mode, but the script now has it in training mode, which is used"}})
end)

T.test("a checkpoint of an older version has no such state, and the script's counts", function()
  local state = require "luatrain.train.state"
  local out, of = T.folder(), state.of
  state.of = function(run)
    local s = of(run)
    for name in pairs(s) do
      if name:find "^current_net" or name:find "^initial_net" then s[name] = nil end
    end
    s.switches = nil
    return s
  end
  local function off(net) net.body:freeze():eval() end
  switch(out, nothing, off, 2)
  state.of = of
  T.equal({switch(out, off, nothing, 3)}, {{false, false, true}, {}})
end)

-- Stops in an evaluation, whose batches the kill is a part of. Prints modes when it begins.
local EVALUATES = [[
local lt = require "luatrain"
local nn = lt.nn
local train = lt.data.open "synthetic:4x4x3/4/32"
local net = nn.sequential{flat = nn.flatten(), body = nn.linear{48, 6}, head = nn.linear{6, 4}}
local sgd = lt.optim.sgd(net, {lr = 0.1})
local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 1, batch = 32}
print(net.body.training, net.head.training)
local kill = {name = "kill", count = function() os.execute "kill -USR1 $PPID" return 0 end}
for _ in run:epochs() do
  for x, y in run:batches() do
    run:step(function()
      net.body:eval()
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      sgd:step()
      return loss
    end)
  end
  run:evaluate(train, {metrics = {kill}})
end
]]

T.test("a stop during an evaluation saves the modes of the training", function()
  local out = T.folder(EVALUATES)
  local text = T.ends(out, "--quiet --out a t.lua", 75, "true\ttrue\n")
  assert(text:find("stopped by SIGUSR1 at step 1", 1, true), text)
  T.ends(out, "--quiet --out a t.lua", 75, "false\ttrue\n")
end)

-- Evaluates other weights, and lowers the learning rate before it. Is stopped in an evaluation.
local AVERAGES = [[
local lt = require "luatrain"
local nn = lt.nn
local train = lt.data.open "synthetic:4x4x3/4/32"
local net = nn.sequential{flat = nn.flatten(), body = nn.linear{48, 6}, head = nn.linear{6, 4}}
local sgd = lt.optim.sgd(net, {lr = 0.1, momentum = 0.9})
local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 3, batch = 8}
local sent = lt.rank() > 0                         -- a second signal would kill
local kill = {name = "kill", count = function()
  if arg[1] == "kill" and run.epoch == 2 and not sent then
    os.execute "kill -USR1 $PPID"
    sent = true
  end
  return 0
end}
for _ in run:epochs() do
  for x, y in run:batches() do
    run:step(function()
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      sgd:step()
      return loss
    end)
    if run.steps == 6 and arg[2] then
      run:evaluate(train, {metrics = {kill}})
      net.head.w:fill(0.5)
    end
  end
  if arg[2] then sgd.lr = sgd.lr * 0.5 end
  local old = net.body.w:detach() * 1
  net.body.w:fill(0)
  local result = run:evaluate(train, {metrics = {kill}})
  net.body.w:copy(old)
  run:report(result)
end
]]

T.test("a stop waits for the end of an evaluation of other weights", function()
  local out = T.folder(AVERAGES)
  for i, mode in ipairs{"", "--ranks 2", "--ranks 1 --parallel async=asgd"} do
    local more = mode:find "async" and "" or "more"          -- what such training refuses
    local function run(name, kill)
      return select(2, T.run(out, ("--quiet --threads 1 --out %s%d %s t.lua %s %s"):format(
        name, i, mode, kill, more)))
    end
    local codes = {run("whole", "-"), run("parts", "kill"), run("parts", "-")}
    local whole, parts = T.sha(("%s/whole%d"):format(out, i)), T.sha(("%s/parts%d"):format(out, i))
    T.equal({mode, codes, parts}, {mode, {0, 75, 0}, whole})
  end
end)

T.finish()
