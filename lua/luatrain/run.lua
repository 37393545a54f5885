-- run.lua - lt.run: a training run that can be watched, stopped and gone on with.
--
--   local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 5, batch = 128}
--   for epoch in run:epochs() do
--     for x, y in run:batches() do
--       run:step(function()
--         local loss = lt.cross_entropy(net(x), y)
--         loss:backward()
--         sgd:step()
--         return loss
--       end)
--     end
--     run:report(run:evaluate(test))
--   end
--
-- A run knows its position: an epoch, and how many of its samples are done. Order and augmentation
-- of the samples are functions of seed and epoch, so this, the tensors and a few counters are all
-- that a run needs to go on as if it had never been stopped. What happens between two steps of the
-- net is the script's own; it is not saved. run.folder, run.epoch, run.steps and run.result, what
-- was reported last, may be read.
--
-- It ends in one of four ways: after the last epoch (or when its variable is closed early), at
-- --max-steps, by a signal, by an error. Each writes an end line with the exit code.

local core = ...
local check = require "luatrain.check"
local checkpoint = require "luatrain.checkpoint"
local command = require "luatrain.command"
local log = require "luatrain.log"
local plot = require "luatrain.plot"
local outside = require "luatrain.outside"
local waits = require "luatrain.waits"
local ops = core.ops

local Run = {}
local SAVE_SECONDS = 600       -- the longest that a checkpoint lies back
local runs, first_folder = 0, nil   -- made by this script

local function fail(...) core.fail("EINVAL", string.format(...)) end

local meta = {
  __name = "luatrain.Run",
  __index = function(_, key)
    local names = {}
    for name in pairs(Run) do names[#names + 1] = name end
    return Run[key] or fail("a run has no '%s'%s", tostring(key),
                            check.hint(tostring(key), names, ""))
  end,
  __newindex = function(_, key) fail("a run has no '%s' to be set", tostring(key)) end,
}

-- ==== Beginning ==================================================================================

local spec = check("lt.run{net:net, optim:optim, train:set, epochs, batch; schedule?:call, "
                   .. "augment?:options, workers?:integer, out?:string, resume?:string, "
                   .. "save_every?, max_steps?}")
local augment = check "augment{; crop=0, flip=false, area:number=1.0}"

-- The name of the script without folder and ending.
local function script_name()
  local path = arg and arg[0] or "run"
  return path:match "[^/]*$":gsub("%.lua$", "")
end

-- The settings of a run, checked; those from outside beat the script's.
local function read_settings(given)
  local o = outside(spec(given))
  if o.batch > #o.train then
    core.fail("EDATA", ("lt.run: batch wants at most the %d images of the training set, it is %d")
              :format(#o.train, o.batch))
  end
  if o.augment == nil then o.augment = o.train.augment or {} end
  o.augment = augment(o.augment or {})
  return o
end

-- The folder, locked. A script that makes several runs and does not say where they go has one --out
-- for all: that of the first, and beside it OUT-2, OUT-3, ...
local function take_folder(self)
  local o, out = self.settings, self.settings.out
  runs = runs + 1
  if o.out_is_the_scripts then
    self.folder = checkpoint.folder(out, o.resume)
  else
    if first_folder then out = ("%s-%d"):format(first_folder, runs) end
    self.folder = checkpoint.folder(out, o.resume, script_name())
    first_folder = first_folder or self.folder
    self.out = first_folder
  end
  local lock, process = core.lock(self.folder .. "/.lock")
  if not lock then
    core.fail("EENV", ("%s: process %s has a run in this folder; wait for it or stop it, or name "
                       .. "another folder with --out"):format(self.folder, process or "unknown"))
  end
  self.lock = lock
  checkpoint.clean(self.folder)
end

-- Refuses a checkpoint of a run that this one cannot continue.
local function check_state(o, state, path)
  if state.seed ~= core.seed() then
    core.fail("EFILE", ("%s was made with seed %d, here it is %d; --seed %d goes on, another --out "
                        .. "begins a new run"):format(path, state.seed, core.seed(), state.seed))
  end
  if state.images ~= #o.train then
    core.fail("EFILE", ("%s was made with a training set of %d images, here it has %d; another "
                        .. "--out begins a new run"):format(path, state.images, #o.train))
  end
end

local function take_over(self, state)
  self.epoch, self.done, self.steps = state.epoch, state.done, state.step
  self.loss_sum = state.loss_sum
  core.set_step(state.counter)
  core.set_draws(state.draws)
  for key, value in pairs(state) do
    local name = key:match "^report%.(.*)$"
    if name then
      self.result = self.result or {}
      self.result[name] = value
    end
  end
end

-- Goes on from a checkpoint, if there is one that is to be used. Returns warnings.
local function resume(self)
  local o, folder = self.settings, self.folder
  local metrics = folder .. "/metrics.jsonl"
  if not o.resume then return {} end
  if o.resume == "never" then
    checkpoint.remove(folder)
    os.remove(metrics)
    return {}
  end
  local from = o.resume == "auto" and folder or o.resume
  local state, path, warnings = checkpoint.load(from, o.net, o.optim, function(...)
    check_state(o, ...)
  end)
  for i, text in ipairs(warnings) do
    warnings[i] = ("%s; going on from %s"):format(text, path)
  end
  if state then
    local newest = checkpoint.newest_step(folder)
    if from ~= folder and newest > state.step then
      core.fail("EUSAGE", ("--resume %s: %s has a newer checkpoint, of step %d; remove it or name "
                           .. "another --out"):format(from, folder, newest))
    end
    take_over(self, state)
    if state.batch ~= o.batch then
      warnings[#warnings + 1] = ("%s was made with batches of %d images, now they have %d")
                                :format(path, state.batch, o.batch)
    end
  elseif o.resume ~= "auto" then
    core.fail("EFILE", ("--resume %s: there is no checkpoint in it"):format(from))
  end
  log.cut(metrics, self.steps, self.epoch)
  return warnings
end

local function steps_per_epoch(o) return (#o.train + o.batch - 1) // o.batch end

local function say_start(self)
  local o, resumed = self.settings, self.steps > 0
  self.log:start{
    version = core.version, script = script_name(), folder = self.folder, device = "cpu",
    backend = core.backend(), threads = core.threads(), seed = core.seed(),
    parameters = o.net:count(), images = #o.train, height = o.train.height, width = o.train.width,
    channels = o.train.channels, classes = o.train.classes, batch = o.batch, epochs = o.epochs,
    steps = steps_per_epoch(o) * o.epochs, step = resumed and self.steps or nil,
    epoch = resumed and math.min(self.epoch, o.epochs) or nil}
end

-- Everything that may fail once the folder is locked.
local function start(self)
  local o = self.settings
  local warnings = resume(self)
  self.log = log.new{folder = self.folder, mode = o.log, quiet = o.quiet}
  setmetatable(self, meta)
  say_start(self)
  for _, text in ipairs(warnings) do self.log:warn(text) end
  if self.epoch > o.epochs then
    self.log:note "all epochs are done already; another --out begins a new run"
  end
  core.listen(true)
end

-- lt.run: see the top.
local function new(given)
  local o = read_settings(given)
  if core.on_run then core.on_run(o) end
  local now = core.clock()
  local self = {
    settings = o, started = now, saved_at = now, failed_saves = 0,
    epoch = 1, done = 0, steps = 0,    -- position: samples of the epoch that are done; all steps
    loss_sum = 0.0,                    -- over these samples
    result = false,                    -- what was reported last
    phase = "new",                     -- then "epoch" and "reported" in turn; in the end "over"
    loader = false, rows = false,      -- what gives batches; the size of the one without a step
    mark = now, waited = 0.0,          -- the end of the last step; how long its batch took to come
    epoch_s = 0.0, epoch_images = 0,   -- the time and the samples of steps in this epoch
    waits = waits.new(), folder = false, out = false, lock = false, log = false,
  }
  take_folder(self)
  local ok, err = pcall(start, self)
  if not ok then
    self.lock:close()
    error(err, 0)
  end
  return self
end

-- ==== Ending =====================================================================================

local function close_loader(self)
  if self.loader then self.loader:close() end
  self.loader, self.rows = false, false
end

-- Writes the end line and gives everything back. exit: the process's exit code, if the script does
-- nothing else.
local function finish(self, exit)
  self.phase = "over"
  close_loader(self)
  core.listen(false)
  local known, sha256 = pcall(self.settings.net.sha256, self.settings.net)
  self.log:event("end", {
    step = self.steps, top1 = self.result and self.result.top1 or nil,
    wall_s = core.clock() - self.started, peak_rss_bytes = core.peak_rss(),
    weights_sha256 = known and sha256 or nil, failed_saves = self.failed_saves, exit = exit})
  if self.failed_saves > 0 then
    self.log:warn(("%d checkpoint%s could not be saved"):format(
      self.failed_saves, self.failed_saves == 1 and "" or "s"))
  end
  self.log:close()
  self.lock:close()
end

-- Writes a checkpoint. Returns whether that was possible, or the reason why it was not.
local function save(self)
  local o, before = self.settings, core.clock()
  local state = {
    step = self.steps, counter = core.steps(), draws = core.draws(), seed = core.seed(),
    epoch = self.epoch, done = self.done, images = #o.train, batch = o.batch,
    loss_sum = self.loss_sum}
  for name, value in pairs(self.result or {}) do state["report." .. name] = value end
  local ok, path = pcall(checkpoint.save, self.folder, o.net, o.optim, state)
  self.saved_at = core.clock()
  self.mark = self.saved_at
  if not ok then
    self.failed_saves = self.failed_saves + 1
    return false, checkpoint.reason(path)
  end
  self.log:event("save", {step = self.steps, path = path, wall_s = self.saved_at - before})
  return true
end

-- Ends the run because what had to be saved was not.
local function give_up(self, what, err)
  finish(self, 5)
  core.fail("EFILE", ("%s: %s. What was saved before is whole; the same command with --out %s goes "
                      .. "on from it"):format(what, checkpoint.reason(err),
                                              self.out or self.folder))
end

local function draw_curves(self)
  local ok, err = pcall(function()
    local events = log.read(self.folder .. "/metrics.jsonl")
    core.write_file(self.folder .. "/curves.svg", plot.curves(events, self.folder:match "[^/]*$"))
  end)
  if not ok then self.log:warn("no curves: " .. checkpoint.reason(err)) end
end

-- The run has done what it was to do.
local function complete(self)
  local names, tensors = self.settings.net:state()
  local path = self.folder .. "/weights.safetensors"
  local ok, err = pcall(core.save, names, tensors, path, {})
  if not ok then give_up(self, "the weights were not saved", err) end
  draw_curves(self)
  self.log:note(("done after %s: %s has weights.safetensors, curves.svg and metrics.jsonl")
                :format(log.duration(core.clock() - self.started), self.folder))
  finish(self, 0)
end

function meta.__close(self, err)
  if self.phase == "over" then return end
  if err == nil then complete(self) else finish(self, core.exit_code(err)) end
end

-- Ends the run, and the script with it, if that is wanted: with everything saved.
local function stop_if_wanted(self)
  local o, reason = self.settings, core.stop_reason()
  local early = not reason and self.steps >= (o.max_steps or math.huge)
  if not reason and not early then return end
  local what = ("stopped by %s at step %d"):format(reason or "--max-steps", self.steps)
  local saved, err = save(self)
  if not saved then give_up(self, what .. " and not saved", err) end
  finish(self, early and 0 or 75)
  core.fail(early and "EDONE" or "ESTOPPED",
            ("%s, saved in %s; this goes on:\n  %s"):format(
              what, self.folder, command(self.out, o.resume, early and "--max-steps" or nil)))
end

-- ==== The loop ===================================================================================

local function expect(self, phase, who, otherwise)
  if self.phase == "over" then fail("%s: this run is over", who) end
  if self.phase ~= phase then fail("%s: %s", who, otherwise) end
end

-- for epoch in run:epochs() do: those that are not done yet. An epoch that the script does not
-- report is reported here. After the last one the run is complete.
function Run:epochs()
  expect(self, "new", "run:epochs", "it was called before, and a run is one loop")
  return function()
    if self.phase == "epoch" then self:report() end
    if self.epoch > self.settings.epochs then return complete(self) end
    stop_if_wanted(self)
    self.phase = "epoch"
    self.epoch_s, self.epoch_images = 0.0, 0
    return self.epoch
  end
end

-- for x, y in run:batches() do: the rest of this epoch, shuffled and augmented. Each batch wants
-- one run:step. The loop has no closing value, which `break` can leave unclosed in Lua 5.4.4; one
-- that was left is closed by what comes next.
function Run:batches()
  local o = self.settings
  expect(self, "epoch", "run:batches", "it belongs into: for epoch in run:epochs() do ... end, "
                                       .. "before the report")
  close_loader(self)
  if self.done >= #o.train then return function() end end
  o.net:train()
  self.mark = core.clock()
  local loader = o.train:open_batches{
    batch = o.batch, shuffle = true, epoch = self.epoch, first = self.done, workers = o.workers,
    crop = o.augment.crop, flip = o.augment.flip, area = o.augment.area}
  self.loader = loader
  return function()
    if self.phase == "over" then fail "run:batches: this run is over" end
    if self.loader ~= loader then fail "run:batches: another loop over the batches was begun" end
    if self.rows then fail "run:batches: the batch before had no run:step" end
    local before = core.clock()
    local x, y = loader:next()
    self.waited = core.clock() - before
    if x then self.rows = x:dim(1) else close_loader(self) end
    return x, y
  end
end

local function number_of(loss)
  local is_tensor = core.is_tensor(loss)
  if is_tensor and loss:count() == 1 then return loss:item() end
  if type(loss) == "number" then return loss end
  fail("run:step: the function wants to return the loss, one number; it returned a %s",
       is_tensor and "tensor " .. core.describe(loss) or type(loss))
end

-- Time as fractions of the step: what is not one of the named parts is `other`.
local function fractions(total, waited, inside, backward, optimizer)
  local f = {data = waited / total, forward = (inside - backward - optimizer) / total,
             backward = backward / total, exposed_comm = 0.0, optimizer = optimizer / total}
  f.other = 1 - f.data - f.forward - f.backward - f.optimizer
  return f
end

-- All that have been seen.
local function samples(self) return (self.epoch - 1) * #self.settings.train + self.done end

-- The learning rate of this step: that of the middle of its samples.
local function set_rate(self, rows)
  local o = self.settings
  if o.schedule then
    o.optim.lr_factor = o.schedule((samples(self) + rows / 2) / #o.train, o.epochs)
  end
  return o.optim.lr * o.optim.lr_factor
end

local function record(self, loss, lr, rows, times)
  local o, total = self.settings, times.total
  local f = fractions(total, self.waited, times.inside, times.backward, times.optimizer)
  f.step, f.steps = self.steps, steps_per_epoch(o) * o.epochs
  f.epoch, f.epochs = self.epoch, o.epochs
  f.samples = samples(self)
  f.loss, f.lr, f.samples_per_s = loss, lr, rows / total
  self.log:step(f)
  local text = self.waits:step(self.waited, total, rows, self.loader)
  if text then self.log:warn(text) end
end

-- run:step(fn, ...): calls fn(...) as lt.step does; it goes forward and backward, takes the step
-- of the optimizer and returns the loss, a mean over the batch. Then comes all that belongs to a
-- step: metrics, saving when it is due, stopping when that is wanted. Returns the loss, a number.
function Run:step(fn, ...)
  local rows, counter = self.rows, core.steps()
  expect(self, "epoch", "run:step", "it belongs into: for x, y in run:batches() do ... end")
  if not rows then fail("run:step: each batch of run:batches has one step") end
  local lr = set_rate(self, rows)
  local started, before = core.clock(), core.times()
  local loss = number_of((core.step(fn, ...)))
  local inside, after = core.clock() - started, core.times()
  if core.steps() == counter then
    fail("run:step: the function took no step of the optimizer; lt.pieces adds up parts of a batch")
  end
  if loss - loss ~= 0 then
    core.fail("ENUMERIC", ("the loss is %s at step %d; look at the learning rate and at the data")
              :format(loss ~= loss and "nan" or "inf", self.steps + 1))
  end
  self.rows, self.done, self.steps = false, self.done + rows, self.steps + 1
  self.loss_sum = self.loss_sum + loss * rows
  local total = core.clock() - self.mark
  self.mark = self.mark + total
  self.epoch_s, self.epoch_images = self.epoch_s + total, self.epoch_images + rows
  record(self, loss, lr, rows, {
    total = total, inside = inside, backward = after.backward - before.backward,
    optimizer = after.optimizer - before.optimizer})
  stop_if_wanted(self)
  local every = self.settings.save_every
  if every and self.steps % every == 0 or core.clock() - self.saved_at >= SAVE_SECONDS then
    self:save()
  end
  return loss
end

-- ==== Evaluation and report ======================================================================

local evaluation = check "run.evaluate{set:set; batch?, loss?:call}"

-- Hits and summed loss of one batch.
local function judge(net, loss, x, y)
  local logits = net(x)
  return ops.eq(ops.argmax(logits, 2), y):sum():item(), loss(logits, y):item() * x:dim(1)
end

-- {top1 = , loss = } of the net in eval mode: each sample counts once. Batches of the size that
-- training has, the default, take no memory that training has not had.
function Run:evaluate(set, given)
  local all = {set}
  for key, value in pairs(given or {}) do all[key] = value end
  local o, net = evaluation(all), self.settings.net
  if self.phase == "over" then fail "run:evaluate: this run is over" end
  local loss = o.loss or ops.cross_entropy
  local hits, sum = 0, 0.0
  net:eval()
  for x, y in set:batches{batch = o.batch or self.settings.batch} do
    local right, lost = core.step(core.no_grad, judge, net, loss, x, y)
    hits, sum = hits + right, sum + lost
    stop_if_wanted(self)
  end
  net:train()
  self.mark = core.clock()     -- within an epoch: it is no part of the next step
  return {top1 = hits / #set, loss = sum / #set}
end

-- Ends the epoch: its line, with numbers by name as run:evaluate gives them, and a checkpoint.
function Run:report(numbers)
  expect(self, "epoch", "run:report", self.phase == "reported" and "this epoch was reported already"
                                      or "it belongs into: for epoch in run:epochs() do ... end")
  if self.done == 0 then
    fail("run:report: the epoch had no steps: for x, y in run:batches() do run:step(...) end")
  end
  close_loader(self)
  local fields, result = {}, {train_loss = self.loss_sum / self.done}
  for name, value in pairs(numbers or {}) do
    if type(name) ~= "string" or type(value) ~= "number" then
      fail("run:report wants numbers by name, %s is a %s", tostring(name), type(value))
    end
    fields[name == "loss" and "test_loss" or name], result[name] = value, value
  end
  fields.epoch, fields.epochs, fields.step = self.epoch, self.settings.epochs, self.steps
  fields.samples = samples(self)
  fields.loss, fields.wall_s = result.train_loss, self.epoch_s
  fields.samples_per_s = self.epoch_s > 0 and self.epoch_images / self.epoch_s or 0.0
  self.log:epoch(fields)
  self.result, self.phase = result, "reported"
  self.epoch, self.done, self.loss_sum = self.epoch + 1, 0, 0.0
  self:save()
  return result
end

-- Saves a checkpoint now. A full disk does not end a training.
function Run:save()
  local ok, err = save(self)
  if not ok then
    self.log:warn(("step %d was not saved: %s; the training goes on"):format(self.steps, err))
  end
end

return new
