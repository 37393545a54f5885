-- state.lua - saves the state of a run, except tensors, in checkpoints, and restores it.
--
-- A checkpoint has the optimizer's settings twice: their values when lt.run was called
-- ("initial.lr") and when it was saved ("current.lr"). If the resumed script starts with the same
-- initial value, the current value is restored, so that changes during the run persist. If the
-- initial values differ, the user has changed the script or its flags, and the new value applies.
-- The same holds for what a script can switch in the net: "initial_net.frozen.1.w" for a frozen
-- parameter, "initial_net.eval.2" for a module in eval mode, and "current_net." for the time of the
-- save.
-- The scaler's settings are saved as initial values only ("initial_scaler.scale"); its own state
-- has the current ones.

local core = ...
local checkpoint = require "luatrain.train.checkpoint"
local log = require "luatrain.train.log"
local module = require "luatrain.api.module"
local optims = require "luatrain.train.optims"
local scaler = require "luatrain.api.scaler"
local sorted = require "luatrain.keys"

local state = {}

-- ==== Saving =====================================================================================

-- The shape of the images of a set or a saved state, as text: "32x32x3" (h, w, c).
function state.shape_of(set)
  return ("%dx%dx%d"):format(set.height, set.width, set.channels)
end
local shape_of = state.shape_of

-- The current settings of a run's optimizer. If a schedule sets lr_factor, it is listed as 1.
function state.settings(o)
  local settings = optims.settings(o.optims)
  for name in pairs(o.schedule and settings or {}) do
    if name:find "lr_factor$" then settings[name] = 1.0 end
  end
  return settings
end

-- What a script can switch in a net: {["frozen.1.w"] = true, ["eval.2"] = true} if parameter 1.w is
-- frozen, and module 2 is in eval mode. "eval." is the net itself.
local function switches(net)
  local list, names, values = {["eval."] = not net.training or nil}, module.contents(net)
  for i, name in ipairs(names) do
    local value = values[i]
    if module.is_module(value) then
      list["eval." .. name] = not value.training or nil
    elseif core.role(value) == "parameter" then
      list["frozen." .. name] = not value.on_tape or nil
    end
  end
  return list
end

-- A text that differs after the script has written to the net, frozen a part, set a mode or an
-- option of an optimizer, or drawn random numbers.
function state.mark(run)
  local words, _, tensors = {core.draws()}, run.settings.net:state()
  for _, tensor in ipairs(tensors) do words[#words + 1] = core.tensor_version(tensor) end
  for _, list in ipairs{optims.settings(run.settings.optims), switches(run.settings.net)} do
    for _, name in ipairs(sorted(list)) do
      words[#words + 1] = ("%s=%s"):format(name, list[name])
    end
  end
  return table.concat(words, " ")
end

-- Notes the state of the net and the settings of the optimizers when lt.run is called.
function state.begin(run)
  run.initial = {settings = state.settings(run.settings), net = switches(run.settings.net)}
end

-- For evaluations, which change the modes of the net and may be stopped: until the result is
-- closed, checkpoints have the current modes.
function state.hold(run)
  run.before = switches(run.settings.net)
  return setmetatable({}, {__close = function() run.before = false end})
end

-- Whether all elements are finite. The sum of large finite elements may overflow; then each element
-- is multiplied by 0 first.
local function is_finite(tensor)
  local sum = core.own_item(tensor:sum())
  if sum - sum ~= 0 then sum = core.own_item((tensor * 0):sum()) end
  return sum == sum
end

-- Raises ENUMERIC if a parameter or buffer of the net, or a delayed sum, is not finite. Called
-- before each save: only two checkpoints are kept, so a bad one would replace a good one.
function state.check_weights(run)
  local names, tensors = run.settings.net:state()
  local delayed, sums = run.mode:delayed()
  for i, name in ipairs(delayed) do
    names[#names + 1], tensors[#tensors + 1] = "the gradient of " .. name, sums[i]
  end
  for i, name in ipairs(names) do
    if not core.is_meta(tensors[i]) and not core.step(core.no_grad, is_finite, tensors[i]) then
      local good = checkpoint.newest_step(run.folder)
      good = good > 0 and ("the checkpoint of step %d is the last good one"):format(good)
             or "there is no checkpoint before it"
      core.fail("ENUMERIC", ("the weights are not finite after step %d (%s); check the learning "
                             .. "rate and the data; %s"):format(run.steps, name, good))
    end
  end
end

-- The state of a run as the flat table that checkpoint.save takes.
function state.of(run)
  local o, train = run.settings, run.settings.train
  local s = {
    step = run.steps, counter = core.steps(), random_step = core.random_step(),
    draws = core.draws(), seed = core.seed(),
    epoch = run.epoch, done = run.done, loss_sum = run.loss_sum, epochs = o.epochs, batch = o.batch,
    bf16 = o.amp == "bf16", fp16 = o.amp == "fp16", auto = o.auto and not o.trial,
    trial = o.trial and true or false, other_loss = run.other_loss,
    seconds = core.clock() - run.began, epoch_s = run.epoch_s, epoch_images = run.epoch_images,
    images = #train, height = train.height, width = train.width, channels = train.channels,
    classes = train.classes, optim = optims.classes(o.optims), switches = true}
  for name, value in pairs(o.scaler and o.scaler:state() or {}) do s["scaler." .. name] = value end
  for name, value in pairs(o.scaler and o.scaler:settings() or {}) do
    s["initial_scaler." .. name] = value
  end
  for i, names in ipairs(optims.held(o.net, o.optims)) do s["held." .. i] = names end
  for name, value in pairs(core.wire_scales()) do s["wire_scales." .. name] = value end
  for name, value in pairs(run.mode:numbers()) do s["async." .. name] = value end
  for name, value in pairs(run.result or {}) do s["report." .. name] = value end
  for name, value in pairs(run.initial.settings) do s["initial." .. name] = value end
  for i, part in ipairs(run.share and run.share.parts or {}) do s["share." .. i] = part end
  for name in pairs(run.initial.net) do s["initial_net." .. name] = true end
  for name in pairs(run.before or switches(o.net)) do s["current_net." .. name] = true end
  for name, value in pairs(state.settings(o)) do s["current." .. name] = value end
  return s
end

-- ==== Resuming ===================================================================================

-- The required fields of a state, by type.
local KINDS = {integer = {"step", "counter", "draws", "seed", "epoch", "done", "epochs", "batch",
                          "epoch_images", "images", "height", "width", "channels", "classes"},
               float = {"loss_sum", "seconds", "epoch_s"},
               boolean = {"bf16", "fp16", "auto"}}

-- EFILE if a required field of a checkpoint is missing or has an invalid value.
local function check_whole(s, path)
  for _, kind in ipairs(sorted(KINDS)) do
    for _, name in ipairs(KINDS[kind]) do
      local value = s[name]
      if value == nil then
        core.fail("EFILE", ("%s: the checkpoint has no '%s'"):format(path, name))
      elseif (math.type(value) or type(value)) ~= kind
             or kind == "integer" and value < 0 and name ~= "seed" then
        core.fail("EFILE", ("%s: the checkpoint has an invalid '%s'"):format(path, name))
      end
    end
  end
end

-- The entries of s whose names begin with prefix, with the prefix removed.
local function part(s, prefix)
  local list = {}
  for key, value in pairs(s) do
    if key:sub(1, #prefix) == prefix then list[key:sub(#prefix + 1)] = value end
  end
  return list
end

-- EFILE if a run with settings o cannot resume from a checkpoint with state s. EUSAGE if either
-- is a replay, whose checkpoints have no tensors of asynchronous training.
local function check(mode, o, s, path)
  check_whole(s, path)
  if mode.is_replay or s["async.samples"] and not s.async then
    core.fail("EUSAGE", ("%s: the replay of a trace cannot be resumed, nor resume another run; "
                         .. "name a new folder with --out"):format(path))
  end
  if s.seed ~= core.seed() then
    core.fail("EFILE", ("%s was made with seed %d, but now it is %d; resume with --seed %d, or "
                        .. "start a new run with another --out"):format(path, s.seed, core.seed(),
                                                                        s.seed))
  end
  for _, item in ipairs{
    {"a training set of %d images, but now it has %d", s.images, #o.train},
    {"images of %s, but now they are %s", shape_of(s), shape_of(o.train)},
    {"%d classes, but now there are %d", s.classes, o.train.classes},
    {"%s, but the script now makes %s", s.optim or optims.classes(o.optims),
     optims.classes(o.optims)},
    {"%s training, but now it is %s", s["async.samples"] and "asynchronous" or "synchronous",
     mode.name},
    {"batches of %d images, which an asynchronous run cannot change to %d",
     mode.has_fixed_batch and s.batch, mode.has_fixed_batch and o.batch},
  } do
    local text, was, is = table.unpack(item)
    if was ~= is then
      core.fail("EFILE", ("%s was made with %s; start a new run with another --out")
                         :format(path, text:format(was, is)))
    end
  end
  optims.check_held(o.net, o.optims, part(s, "held."), path)
end

local function shown(value)
  return math.type(value) == "float" and ("%.14g"):format(value) or tostring(value)
end

local function changed_text(path, name, was, is)
  return ("%s was made with %s = %s, but the script now has %s, which is used")
         :format(path, name, shown(was), shown(is))
end

-- Compares tables of values by name: `initial` from the start of the run, `saved` from its
-- checkpoint, `now` from the script. In the order of the names, calls restore(name, saved value)
-- for each value that the run has changed, and changed(name, saved value) for each that the user
-- has.
local function compare(initial, saved, now, restore, changed)
  local all = {}
  for _, list in ipairs{initial, saved, now} do
    for name in pairs(list) do all[name] = true end
  end
  for _, name in ipairs(sorted(all)) do
    if now[name] ~= saved[name] then
      (now[name] == initial[name] and restore or changed)(name, saved[name])
    end
  end
end

-- Restores the optimizer's settings as described above. Appends a warning for each setting that the
-- user has changed.
local function restore_settings(run, s, path, warnings)
  local now = run.initial.settings
  compare(part(s, "initial."), part(s, "current."), now, function(name, saved)
    optims.set(run.settings.optims, name, saved)
  end, function(name, saved)
    warnings[#warnings + 1] = changed_text(path, name, saved, now[name])
  end)
end

local KINDS_OF_SWITCH = {
  frozen = {"%s frozen, but the script now trains %s", "%s trained, but the script now freezes %s"},
  eval = {"%s in eval mode, but the script now has %s in training mode",
          "%s in training mode, but the script now has %s in eval mode"},
}

-- Freezes or unfreezes parameters, and sets modes. on: true or false by the names of switches().
local function apply_switches(net, on)
  local names, values = module.contents(net)
  if on["eval."] ~= nil then net.training = not on["eval."] end
  for i, name in ipairs(names) do
    local frozen, eval = on["frozen." .. name], on["eval." .. name]
    if module.is_module(values[i]) then
      if eval ~= nil then values[i].training = not eval end
    elseif frozen ~= nil then
      core.freeze({name}, {values[i]}, frozen)
    end
  end
end

-- Restores which parameters are frozen, and the modes of modules, as described above. Appends a
-- warning for each kind of change by the user.
local function restore_switches(run, s, path, warnings)
  if not s.switches then return end    -- an older version did not save them
  local on, changed = {}, {}
  compare(part(s, "initial_net."), part(s, "current_net."), run.initial.net, function(name, saved)
    on[name] = saved or false
  end, function(name, saved)
    local kind, own = name:match "^(%l+)%.(.*)$"
    local text = KINDS_OF_SWITCH[kind][saved and 1 or 2]
    changed[text] = changed[text] or {}
    table.insert(changed[text], own == "" and "the net" or own)
  end)
  apply_switches(run.settings.net, on)
  for _, text in ipairs(sorted(changed)) do
    local names = changed[text]
    warnings[#warnings + 1] = ("%s was made with %s, which is used"):format(
      path, text:format(optims.text_of(names), #names == 1 and "it" or "them"))
  end
end

-- Restores the precision that amp = "auto" has chosen, if its trial was over.
local function restore_amp(o, s)
  if o.trial and s.auto then o.amp, o.trial = s.bf16 and "bf16" or "off", false end
end

-- Restores the loss scaler, if the checkpoint has one with the same policy. Appends a warning if
-- not, and for each setting that the user has changed.
local function restore_scaler(run, s, path, warnings)
  local state, initial, is = part(s, "scaler."), part(s, "initial_scaler."), run.settings.scaler
  if not is then return end
  local was, policy = scaler.policy_of(state), scaler.policy_of(is:state())
  if next(state) and (not was or was == policy) then
    local changed = {}
    for _, name in ipairs(sorted(is:settings())) do
      local value = is:settings()[name]
      changed[name] = initial[name] ~= nil and initial[name] ~= value
      if changed[name] then
        warnings[#warnings + 1] = changed_text(path, name, initial[name], value)
      end
    end
    local ok, why = pcall(is.load_with_changes, is, state, changed)
    if not ok then core.fail("EFILE", ("%s: %s"):format(path, checkpoint.reason(why))) end
  elseif was or s.fp16 then
    warnings[#warnings + 1] = ("%s was made %s, but now it is %s, which starts over"):format(
      path, was and "with scaler " .. was or "without a loss scale", policy)
  end
end

local function take_over(run, s)
  run.epoch, run.done, run.steps, run.loss_sum = s.epoch, s.done, s.step, s.loss_sum
  run.saved_step = s.step
  run.other_loss = s.other_loss or false           -- older checkpoints do not have it
  run.epoch_s, run.epoch_images = s.epoch_s, s.epoch_images
  run.began = core.clock() - s.seconds
  core.set_step(s.counter, s.random_step or s.counter)       -- older checkpoints do not have it
  core.set_draws(s.draws)
  core.restore_wire_scales(part(s, "wire_scales."))
  local result = part(s, "report.")
  if next(result) then run.result = result end
end

-- Appends a warning for each difference in batch, epochs, precision and delay. These do not prevent
-- resuming.
local function differences(run, s, path, warnings)
  local o = run.settings
  for _, item in ipairs{
    {"with batches of %d images, but now they have %d", s.batch, o.batch},
    {"for %d epochs, but now there are %d", s.epochs, o.epochs},
    {"with amp %s, but now it is %s",
     s.trial and "auto" or s.bf16 and "bf16" or s.fp16 and "fp16" or "off", o.amp, o.auto},
    {"with delay=%d in --parallel, but now it is %d", s.delay, run.mode.delay},
  } do
    local text, was, is, open = table.unpack(item)
    if was ~= is and not open then
      warnings[#warnings + 1] = ("%s was made %s"):format(path, text:format(was, is))
    end
  end
end

-- Applies the setting `resume` of a run: resumes from a checkpoint if there is one, or with "never"
-- removes the folder's checkpoints. A worker of an elastic job does nothing: the server sends it
-- the weights. Returns a list of warnings, and what the mode has saved in the checkpoint,
-- {tensors =, numbers =}; nil without a checkpoint.
function state.resume(run)
  local o, folder = run.settings, run.folder
  if not o.resume or core.is_elastic() and not run.root then return {} end
  if o.resume == "never" then
    if run.root then checkpoint.remove(folder) end
    return {}
  end
  local from = o.resume == "auto" and folder or o.resume
  local s, path, warnings = checkpoint.load(from, o.net, o.optims, run.mode, function(...)
    check(run.mode, o, ...)
  end)
  for i, text in ipairs(warnings) do
    warnings[i] = ("%s; resuming from %s"):format(text, path)
  end
  if s then
    local newest = checkpoint.newest_step(folder)
    if from ~= folder and newest > s.step then
      core.fail("EUSAGE", ("--resume %s: %s has a newer checkpoint, of step %d; remove it or name "
                           .. "another --out"):format(from, folder, newest))
    end
    if run.root and path:match "^(.*)/" == folder then
      run.checkpoints = checkpoint.own(folder, s.step)
    end
    take_over(run, s)
    restore_amp(o, s)
    if run.share then run.share:restore(part(s, "share."), path) end
    differences(run, s, path, warnings)
    restore_settings(run, s, path, warnings)
    restore_switches(run, s, path, warnings)
    restore_scaler(run, s, path, warnings)
  elseif o.resume ~= "auto" then
    core.fail("EFILE", ("--resume %s: it has no checkpoint"):format(from))
  end
  if run.root then log.cut(folder .. "/metrics.jsonl", run.steps, run.epoch) end
  return warnings, s and {tensors = s.async or {}, numbers = part(s, "async.")}
end

return state
