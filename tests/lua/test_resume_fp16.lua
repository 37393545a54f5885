-- test_resume_fp16.lua - resumed runs in fp16: changed settings of the scaler, incomplete
-- checkpoints, and skipped steps in the log; options that no run used.
local lt = require "luatrain"
local T = require "lt_test"

-- In step `at` of the run, the loss is multiplied by 1e35, which overflows at any scale. With
-- policy "off", the loss is not scaled.
local SCRIPT = [[
local lt = require "luatrain"
local opt = lt.args{policy = "adaptive", scale = 65536.0, interval = 2000, at = 0, epochs = 2}
local train, test = lt.data.open "synthetic:6x6x1/3/48"
local net = lt.nn.sequential{lt.nn.conv2d{1, 4, 3}, lt.nn.relu(), lt.nn.flatten(),
                             lt.nn.linear{64, 3}}
local n = 0
lt.fit{net = net, train = train, test = test, epochs = opt.epochs, batch = 8, out = "run",
       optim = lt.optim.sgd(net, {lr = 0.01}),
       loss = function(z, y)
         n = n + 1
         return lt.cross_entropy(z, y) * (n == opt.at and 1e35 or 1.0)
       end,
       scaler = opt.policy ~= "off" and {policy = opt.policy, scale = opt.scale,
                                         growth_interval = opt.policy == "dynamic"
                                                           and opt.interval or nil}}
]]

local function new_folder() return T.folder(SCRIPT) end

-- Runs the script, which must end with exit code 0. Returns its output.
local function run(out, options, arguments)
  return T.ends(out, ("--threads 1 %s t.lua %s"):format(options, arguments or ""), 0, "")
end

-- The values of a field in all events of one kind.
local function fields(out, kind, name)
  local list = T.events(out .. "/run", kind)
  for i, event in ipairs(list) do list[i] = event[name] end
  return list
end

-- ==== A changed scaler ===========================================================================

-- Runs 4 steps with the flags `was`, then 3 with `now`. Checks the warning text and that step 5 has
-- this scale. Returns the scales of all steps.
local function check_change(policy, more, was, now, text, scale)
  local out = new_folder()
  local options = ("--policy %s %s "):format(policy, more)
  run(out, "--quiet --amp fp16 --max-steps 4", options .. was)
  run(out, "--quiet --amp fp16 --max-steps 6", options .. now)
  run(out, "--quiet --amp fp16 --max-steps 7", options .. now)       -- unchanged: no warning
  T.equal(fields(out, "warn", "text"), {"run/step-00000004.safetensors was made with " .. text
                                        .. ", which is used"})
  T.equal(fields(out, "step", "scale")[5], scale)
  return fields(out, "step", "scale")
end

T.test("a scale or interval that the script changed applies to the resumed run", function()
  local text = "scale = 1024, but the script now has 8"
  T.equal(check_change("static", "", "--scale 1024", "--scale 8", text, 8.0),
          {1024.0, 1024.0, 1024.0, 1024.0, 8.0, 8.0, 8.0})
  check_change("adaptive", "", "--scale 1024", "--scale 8", text, 8.0)
  check_change("dynamic", "--interval 3", "--scale 1024", "--scale 8", text, 8.0)
  T.equal(check_change("dynamic", "--scale 8", "--interval 2000", "--interval 2",
                       "growth_interval = 2000, but the script now has 2", 8.0),
          {8.0, 8.0, 8.0, 8.0, 8.0, 16.0, 16.0})
end)

T.test("consecutive skips under another scale do not count", function()
  local scaler <close> = lt.amp.scaler{policy = "static", scale = 8}
  local state = scaler:state()
  state.k, state.steps, state.skipped, state.in_a_row, state.at_floor = 10, 20, 9, 9, 9
  scaler:load_with_changes(state, {})
  T.equal(scaler:state(), state)
  scaler:load_with_changes(state, {scale = true})
  T.equal(scaler.scale, 1024.0)                     -- as before the load
  state.in_a_row, state.at_floor = 0, 0
  T.equal(scaler:state(), state)
end)

-- ==== A changed checkpoint =======================================================================

-- A run that was stopped at step 4. change(texts) modifies the metadata of its checkpoint.
local function changed_run(options, arguments, change)
  local out = new_folder()
  local path = out .. "/run/step-00000004.safetensors"
  run(out, "--quiet --max-steps 4 " .. options, arguments)
  local tensors, meta = lt.load(path)
  change(meta)
  lt.save(path, tensors, meta)
  return out
end

local first = changed_run("--amp fp16", "", function() end)
local tensors, meta = lt.load(first .. "/run/step-00000004.safetensors")

-- Resumes from this checkpoint with one metadata text replaced. Returns the output and exit code.
local function resume_with(name, value)
  local before = meta[name]
  meta[name] = value
  lt.save(first .. "/run/step-00000004.safetensors", tensors, meta)
  meta[name] = before
  return T.run(first, "--threads 1 --quiet --amp fp16 --max-steps 5 t.lua")
end

T.test("an incomplete checkpoint is refused, and the error names the field", function()
  local at = "luatrain: t.lua:7: run/step-00000004.safetensors: "
  local function refused(name, value, wanted)
    local text, code = resume_with(name, value)
    T.equal({code, text}, {5, at .. wanted .. "\n"})
  end
  for _, name in ipairs{"counter", "draws", "seconds", "epoch", "done", "loss_sum", "epoch_s",
                        "seed", "step", "height", "fp16"} do
    refused(name, nil, ("the checkpoint has no '%s'"):format(name))
  end
  for name, value in pairs{epoch = "1.5", done = "-8", seconds = "true", auto = "1",
                           loss_sum = "7"} do
    refused(name, value, ("the checkpoint has an invalid '%s'"):format(name))
  end
  refused("scaler.policy", nil, "scaler:load: the state has no 'policy'")
  refused("scaler.policy", "9", "'policy' of a scaler is out of range")
  refused("scaler.k", nil, "scaler:load: the state has no 'k'")
end)

T.test("a checkpoint without the name of its optimizer can be resumed", function()
  local text, code = resume_with("optim", nil)
  T.equal(code, 0)
  assert(text:find("stopped by --max-steps at step 5", 1, true), text)
end)

T.test("the end line counts buckets that were sent again before the run was resumed", function()
  local options = "--quiet --amp fp16 --ranks 2 --wire fp16 "
  local out = changed_run(options, "", function(texts) texts["wire_scales.resends"] = "500" end)
  run(out, options .. "--max-steps 5")
  local counts = fields(out, "end", "resends")
  assert(#counts == 2 and counts[1] < 100 and counts[2] >= 500, table.concat(counts, " "))
end)

T.test("a resumed fp16 run warns if the checkpoint has no scale", function()
  local function drop(texts)
    for name in pairs(texts) do
      if name:find "^scaler%." then texts[name] = nil end
    end
  end
  local made = "run/step-00000004.safetensors was made with"
  local wanted = {made .. "out a loss scale, but now it is adaptive, which starts over"}
  for _, case in ipairs{{"", drop}, {"--policy off", function() end}} do
    local out = changed_run("--amp fp16", table.unpack(case))
    run(out, "--quiet --amp fp16 --max-steps 5")
    T.equal(fields(out, "warn", "text"), wanted)
  end
  -- f32 has no scale; the warning is about the precision instead.
  local out = changed_run("", "", function() end)
  run(out, "--quiet --amp fp16 --max-steps 5")
  T.equal(fields(out, "warn", "text"), {made .. " amp off, but now it is fp16"})
  out = changed_run("--amp fp16", "--policy off", function() end)
  run(out, "--quiet --amp fp16 --max-steps 5", "--policy off")
  T.equal(fields(out, "warn", "text"), {})
end)

-- ==== The log ====================================================================================

T.test("the lines of epochs and the last line count skipped steps", function()
  local out = new_folder()
  local text = run(out, "--amp fp16", "--policy static --at 8")
  local one, two, done = text:match "(epoch 1/2  loss.-)\n.-(epoch 2/2  loss.-)\n(.-)\n"
  assert(not one:find "skipped", text)
  assert(two:find "  test loss [%d.]+  1 of 12 steps was skipped  [%d,.]+ img/s  ", text)
  assert(done:find "^done after %d+ s, 1 of 12 steps was skipped: run has weights", text)
  text = run(new_folder(), "--amp fp16", "--policy static")
  assert(text:find "\ndone after %d+ s: run has" and not text:find "skipped", text)
end)

-- ==== Options without a run ======================================================================

local LOOP = [[
local lt = require "luatrain"
local fc = lt.nn.linear{4, 2}
local sgd = lt.optim.sgd(fc, {lr = 0.1})
%s
for _ = 1, %d do
  fc(lt.ones{2, 4}):cast("f32"):sum():backward()
  sgd:step()
end
]]

T.test("options for runs in a script without a run cause warnings", function()
  local out = T.folder()
  local function warns(options, before, steps, wanted)
    T.write(out .. "/loop.lua", LOOP:format(before, steps))
    local text, code = T.run(out, options .. " loop.lua")
    T.equal({code, text}, {0, wanted and "luatrain: warning: " .. wanted .. "\n" or ""})
  end
  local scale = "--amp fp16: without lt.run or lt.fit, the script trained %s with no loss "
                .. "scale; add local scaler <close> = lt.amp.scaler{} to its loop"
  warns("--amp fp16", "", 3, scale:format "3 steps")
  warns("--amp fp16 --ranks 2 --threads 1", "", 1, scale:format "1 step")
  warns("--amp fp16", "local scaler <close> = lt.amp.scaler{}", 3)
  warns("--amp fp16", "", 0)
  warns("--amp bf16", "", 3)
  warns("--amp off", "", 3)
  warns("--amp auto", "", 0, "--amp auto applies only to lt.run and lt.fit; the script called "
                             .. "neither, so it ran in f32")
  warns("--amp bf16 --amp-check 5", "", 3, "--amp-check 5 applies only to lt.run and lt.fit; the "
                                           .. "script called neither; use lt.amp.check in its own "
                                           .. "loop")
  warns("--amp bf16 --amp-check 5", "require = nil", 3)
  local text = run(new_folder(), "--quiet --amp auto", "--epochs 1")
  T.equal(text, "")
end)

-- ==== Invalid calls ==============================================================================

T.test("invalid calls of a scaler", function()
  local scaler <close> = lt.amp.scaler{}
  T.fails(function() scaler:inside() end, "scaler:inside requires a function, but got nil")
  T.fails(function() scaler:at "x" end, "scaler:at requires the number of a step, but got 'x'")
  T.fails(function() scaler:at(1.5) end, "scaler:at requires the number of a step, but got 1.5")
  for _, name in ipairs{"inside", "begin", "latest", "at", "close", "settings", "state", "load"} do
    local wanted = ("scaler:%s must be called with a colon: scaler:%s(...)"):format(name, name)
    T.fails(function() scaler[name]() end, wanted)
    T.fails(function() scaler[name]{} end, wanted)
  end
  T.equal(scaler:inside(function(x) return x end, 7), 7)
end)

T.finish()
