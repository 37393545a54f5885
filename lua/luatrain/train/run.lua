-- run.lua - lt.run: a training run that can be watched, stopped and resumed.
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
-- A run knows its position: the epoch, and the number of samples done in it. The order and the
-- augmentation of the samples are functions of seed and epoch. The position, the tensors and a few
-- counters therefore suffice to resume a run exactly. Other state of the script is not saved.
-- run.folder, run.epoch, run.steps, run.phase and run.result (the last report) may be read.
--
-- A run ends after the last epoch, at --max-steps, on a signal or on an error. It ends early, and
-- saves a checkpoint, if its variable is closed or the script calls os.exit(). In each case it
-- writes an end line with the exit code. If the variable is not <close>, the run ends when it is
-- garbage-collected, with a warning and without an exit code in its end line.

local core = ...
local agree = require "luatrain.train.agree"
local async = require "luatrain.train.async"
local amp_check = require "luatrain.api.amp_check"
local check = require "luatrain.check"
local command_line = require "luatrain.command_line"
local ending = require "luatrain.train.ending"
local evaluate = require "luatrain.train.evaluate"
local exits = require "luatrain.train.exits"
local folder = require "luatrain.train.run_folder"
local log = require "luatrain.train.log"
local lone_rows = require "luatrain.train.lone_rows"
local mixup = require "luatrain.api.mixup"
local mode = require "luatrain.train.mode"
local module = require "luatrain.api.module"
local pipeline_mode = require "luatrain.train.pipeline_mode"
local server_mode = require "luatrain.train.server_mode"
local progress = require "luatrain.train.progress"
local optims = require "luatrain.train.optims"
local overrides = require "luatrain.train.overrides"
local ranks = require "luatrain.train.ranks"
local scaler = require "luatrain.api.scaler"
local share = require "luatrain.train.share"
local phases = require "luatrain.train.phases"
local state = require "luatrain.train.state"
local trial = require "luatrain.train.trial"
local data_wait = require "luatrain.train.data_wait"

local Run = require "luatrain.arity".methods("run:", "luatrain.Run")

local function fail(...) core.fail("EINVAL", string.format(...)) end

local meta = {
  __name = "luatrain.Run",
  __index = check.strict(Run, "a run"),
  __newindex = function(_, key) fail("a run has no settable field '%s'", tostring(key)) end,
}

-- ==== Beginning ==================================================================================

-- optim: an optimizer or a list; loss: the training's loss, for run:evaluate; mixup: alpha, see
-- mixup.lua; sizes: see phases.lua; target: top1, see cost.lua; scaler: options of lt.amp.scaler,
-- for fp16, or false for no loss scale.
local spec = check("lt.run{net:net, optim:optims, train:set, epochs, batch; schedule?:call, "
                   .. "loss?:call, augment?:options, mixup:amount=0.0, sizes?:list, target?:share, "
                   .. "workers?:integer, out?:path, resume?:path, save_every?, max_steps?, "
                   .. "amp?:amp, scaler?:options}")
local augment = check "augment{; crop=0, flip=false, area:number=1.0}"

-- Checks the settings of a run. Command-line options and variables override the script's settings.
local function read_settings(given)
  local o = overrides(spec(given))
  o.optims, o.optim = o.optim, o.optim[1]
  o.warning = optims.check(o.net, o.optims)
  if o.augment == nil then o.augment = o.train.augment or {} end
  o.augment = augment(o.augment or {})
  o.phases = phases.read(o)
  return o
end

-- Makes the loss scaler of a run; false if it has none. The options are checked in any precision.
local function make_scaler(o)
  local made = o.scaler ~= false and scaler.new(o.scaler or {})
  return o.amp == "fp16" and made
end

local function print_start(self)
  local o, resumed = self.settings, self.steps > 0
  local fields = {
    version = core.version, script = command_line.script(), folder = self.folder,
    device = core.device(), backend = core.backend(), ranks = self.ranks,
    share = self.share and self.share.parts or share.list(), threads = core.threads(),
    amp = o.trial and "auto" or o.amp,
    seed = core.seed(),
    parameters = o.net:count(), images = #o.train, height = o.train.height, width = o.train.width,
    channels = o.train.channels, classes = o.train.classes, batch = o.batch, epochs = o.epochs,
    target = o.target,
    steps = self.mode:last_step(), step = resumed and self.steps or nil,
    epoch = resumed and self.epoch <= o.epochs and self.epoch or nil}
  self.mode:add_start_fields(fields)
  self.log:start(fields)
end

-- The part of lt.run that may fail after the folder is locked; new() then releases the lock.
local function start(self)
  local o = self.settings
  state.begin(self)
  core.bn_stats_synchronize()            -- forward passes so far do not belong to the first step
  self.listener = core.listen()          -- on all ranks, before any rank reports its start
  agree.settings(self)
  local warnings, saved = state.resume(self)
  folder.send_note(self)
  warnings[#warnings + 1] = o.warning
  agree.start(self)
  self.mode:open(saved, warnings)
  self.log = self.root and log.new{folder = self.folder, mode = o.log, quiet = o.quiet,
                                   seconds = core.clock() - self.began} or log.other()
  setmetatable(self, meta)     -- last, so that __gc runs before the finalizers of what it uses
  print_start(self)
  if self.root then self.mode:print_start() end
  if self.unfinished then
    self.log:note(("%s is not finished; resume it with --out %s"):format(self.unfinished,
                                                                        self.unfinished))
  end
  for _, text in ipairs(warnings) do self.log:warn(text) end
  if self.epoch > o.epochs then
    self.log:note "all epochs are already done; start a new run with another --out"
  end
  exits.add(self)
  self.mark_of_state = state.mark(self)
end

-- Starts or resumes a training run and returns it. lua/luatrain/train/run.lua describes the loop.
local function new(given)
  local o = read_settings(given)
  local observer = core.on_run and core.on_run(o) or false      -- on_run may change the settings
  local own_mode = pipeline_mode.of(o) or async.of(o) or server_mode.of(o) or mode.of(o)
  o.auto = o.amp == "auto"
  o.trial = trial.begin(o)
  o.scaler = make_scaler(o)
  local now, rank, size = core.clock(), core.rank()
  local self = {
    settings = o, began = now, saved_at = now, saved_step = 0, failed_saves = 0,
    save_cost = 0.0,                   -- seconds that the last checkpoint took
    root = rank == 0,                  -- rank 0 logs and saves for all ranks
    mode = own_mode,                   -- see mode.lua
    ranks = size, alone = own_mode:is_alone(),
    stop = false,                      -- the signal by which a rank requested a stop
    shards = core.shards(), shard = 0, -- this rank's shards of the batch; the current one, from 1
    losses = {}, spent = false,        -- per shard: its share of the loss; the step's time, bytes
    open_step = false,                 -- the last step until its loss is read: see end_step
    rate = false,                      -- learning rate of the current batch
    initial = false, before = false,   -- see state.lua; state of the net before an evaluation
    grain = o.mixup > 0 and 2 or 1,    -- groups of this many images stay on one rank
    epoch = 1, done = 0, steps = 0,    -- position: the epoch, its samples done; total steps
    phase = o.phases[1],               -- the phase of the current epoch
    loss_sum = 0.0,                    -- sum of the loss over the epoch's samples so far
    result = false, told_of_loss = false,   -- the last report; see progress.warn_of_result
    other_loss = false,                -- whether the last step did not call lt.cross_entropy
    status = "new",                    -- then "epoch" and "reported" in turn; finally "over"
    loader = false, rows = false,      -- yields batches; size of the batch that awaits its step
    stepped = false,                   -- set of the optimizers that stepped for this batch
    counter = 0, inside = false,       -- core.steps() at that batch; whether run:step is calling fn
    is_settled = true,                 -- whether the last step had its settle()
    mark_of_state = "",                -- state.mark() at the end of the last loop over batches
    is_partial = false,                -- whether only a part of the batch's shards had a step
    saved = false,                     -- whether the last checkpoint is up to date
    mark = now, waited = 0.0,          -- end of the last step; seconds spent on its data
    epoch_s = 0.0, epoch_images = 0,   -- time and samples of the steps in this epoch
    data_wait = data_wait.new(), folder = false, out = false, lock = false, log = false,
    listener = false,                  -- while it is open, a signal is a request to stop
    checkpoints = {},                  -- this run's, in the folder: see checkpoint.prune
    unfinished = false,                -- the folder of the previous run, if it can be resumed
    share = false,                     -- with --share auto: see share.lua
    observer = observer,                 -- called at each step: see bench.lua
    warned_of_eval = false,              -- whether a warning said that the net is in eval mode
  }
  own_mode.run = self
  self.share = share.of(self)
  folder.take(self)
  local ok, err = pcall(start, self)
  if not ok then
    self.status = "over"
    if self.listener then self.listener:close() end
    if self.lock then self.lock:close() end
    error(err, 0)
  end
  return self
end

-- ==== Ending =====================================================================================

-- If a stop was requested or max_steps is reached, saves a checkpoint and ends run and script.
local function stop_if_wanted(self)
  if self.mode:follows() then return end
  folder.check(self)
  local o, reason = self.settings, self.stop or self.alone and core.stop_reason()
  local early = not reason and self.steps >= (o.max_steps or math.huge)
  if not reason and not early then return end
  ending.close_step(self)
  if reason and self.observer then self.observer:stop(reason) end
  self.mode:stop(early and 0 or 75)
  self.mode:compare_step()
  state.check_weights(self)
  local saved, err = ending.save(self)
  local what = ("stopped by %s at step %d"):format(reason or o.max_steps_from, self.steps)
  if reason then core.clear_stop() end
  if not saved then ending.give_up(self, what .. ", but not saved", err) end
  ending.finish(self, early and 0 or 75)
  local flag = early and o.max_steps_from == "--max-steps" and "--max-steps" or nil
  local change = early and not flag and "remove or raise it, then " or ""
  core.fail(early and "EDONE" or "ESTOPPED", ("%s, saved in %s%s"):format(
    what, self.folder, ending.resume_hint(self, change, flag)))
end

-- What follows a step: stops if wanted, and saves if a checkpoint is due. Not in run:step, since
-- what the body of the loop does after it, such as to clamp weights, belongs to the step: a resumed
-- run does not repeat it.
local function settle(self)
  if self.is_settled then return end
  self.is_settled = true
  stop_if_wanted(self)
  ending.save_if_due(self)
end

-- Raises an error if a loop over run:batches has ended between two shards or micro-batches.
local function expect_whole_batch(self, who)
  if not self.is_partial then return end
  fail("%s: the loop over run:batches ended after %d of the %d %s of a batch; leave it only after "
       .. "the last one, when run.steps increases", who, self.shard - (self.rows and 1 or 0),
       self.shards, self.mode.parts)
end

-- Called when the script closes the run or ends; exit: the process's exit code.
function meta.__exit(self, exit)
  if self.status == "over" then return end
  local is_done = exit == 0 and self.epoch > self.settings.epochs
  local ok, why = pcall(function()
    if exit == 0 then
      expect_whole_batch(self, "lt.run")
      settle(self)
    end
    return (is_done and ending.complete or ending.leave)(self, exit)
  end)
  if ok then return end
  if self.status ~= "over" then ending.finish(self, core.exit_code(why), true) end
  error(why, 0)
end

function meta.__close(self, err)
  if err == nil then return meta.__exit(self, 0) end
  if self.status ~= "over" then ending.finish(self, core.exit_code(err), true) end
end

function meta.__gc(self)
  if self.status == "over" then return end
  self.log:warn(("the run in %s was not closed: write local run <close> = lt.run{...}")
                :format(self.folder))
  ending.finish(self, nil, true)
end

-- Ends a run that another rank has stopped, or that has nothing left to do.
local function stopped(self, code, why)
  ending.finish(self, code)
  core.fail(code == 0 and "EDONE" or "ESTOPPED", why)
end

-- ==== The loop ===================================================================================

-- The checks that all methods share.
local function check_call(self, who)
  if self.status == "over" then fail("%s: this run is over", who) end
  if self.inside then fail("%s must not be called inside run:step", who) end
end

local function expect(self, status, who, otherwise)
  check_call(self, who)
  if self.status ~= status then fail("%s: %s", who, otherwise) end
end

-- for epoch in run:epochs() do: iterates over the remaining epochs. Reports an epoch that the
-- script did not report. After the last epoch, completes the run.
function Run:epochs()
  expect(self, "new", "run:epochs", "it was already called, and a run is one loop")
  return function()
    if self.status == "epoch" then self:report() end
    if self.epoch > self.settings.epochs then return ending.complete(self) end
    stop_if_wanted(self)
    self.phase = phases.at(self.settings.phases, self.epoch)
    self.status = "epoch"
    return self.epoch
  end
end

-- Opens a pass over the images of an epoch, from position `first` on, or over requested batches.
local function open_pass(self, epoch, first, workers, on_request)
  local o, phase = self.settings, phases.at(self.settings.phases, epoch)
  return o.train:sized(phase.size):open_batches{
    batch = phase.batch, shuffle = true, epoch = epoch, first = first, workers = workers,
    crop = o.augment.crop, flip = o.augment.flip, area = phase.area, shard = self.mode.is_sharded,
    grain = self.grain, on_request = on_request}
end

-- Warns once if the whole net is in eval mode: the script has probably forgotten net:train().
local function warn_of_eval_mode(self)
  if self.warned_of_eval or module.is_training(self.settings.net) then return end
  self.warned_of_eval = true
  self.log:warn("the net is in eval mode, so dropout does nothing and batch norm uses its running "
                .. "statistics; call net:train() before the loop over run:batches()")
end

-- for x, y in run:batches() do: iterates over the rest of this epoch, shuffled and augmented. Each
-- batch requires one run:step. All modules keep their mode. The loop has no closing value, because
-- `break` in Lua 5.4.4 may not close it; the next run:batches or run:report, or the end of the run,
-- closes a loader left open.
function Run:batches()
  expect(self, "epoch", "run:batches", "call it inside: for epoch in run:epochs() do ... end, "
                                       .. "before the report")
  ending.close_loader(self)
  expect_whole_batch(self, "run:batches")
  settle(self)
  if not self.mode:has_batches() then
    self.mark_of_state = state.mark(self)
    return function() end
  end
  warn_of_eval_mode(self)
  lone_rows.watch(self)
  self.mark = core.clock()
  return self.mode:batches(open_pass, settle, stop_if_wanted, stopped)
end

-- Sets the learning rate of this step and returns it: the schedule at the middle of its samples.
local function set_rate(self, rows)
  local o = self.settings
  if o.schedule then
    local epoch = (self.mode:position() + rows / 2) / #o.train
    local factor = o.schedule(epoch, o.epochs)
    if type(factor) ~= "number" or not (factor >= 0 and factor < math.huge) then
      fail("run:step: the schedule must return a non-negative number, but at epoch %.6g it "
           .. "returned %s", epoch, type(factor) == "number" and factor or check.described(factor))
    end
    for _, optim in ipairs(o.optims) do optim.lr_factor = factor end
  end
  return o.optim.lr * o.optim.lr_factor
end

local inside_meta = {__close = function(self)
  self.run.inside, core.on_step = false, false
  lone_rows.stop()
end}

-- Calls lt.step(fn, ...) in the run's precision and with its loss scale, with `inside` set.
local function call_inside(self, fn, ...)
  local _ <close> = setmetatable({run = self}, inside_meta)
  self.inside, core.on_step = true, function(optim) return optims.expect(self, optim) end
  -- Forward passes between steps must not shift the random numbers of this one.
  core.take_shard(self.rows, self.shard, self.grain)
  core.expect_backwards(0)             -- the number is unknown; lt.micro_batches may set it
  core.calls_of_cross_entropy()        -- starts a new count
  local given = self.mode:call(fn, ...)
  core.end_shard()
  self.other_loss = core.calls_of_cross_entropy() == 0
  return given
end

-- Runs fn on one shard of the batch. Returns its loss, and the value that run:step returns for it.
local function step_shard(self, fn, ...)
  local started, before, spent = core.clock(), core.times(), self.spent
  local waited = ranks.waited()
  local given = call_inside(self, fn, ...)
  local loss = self.mode:take_loss(given)
  if self.settings.trial or self.observer then core.sync() end    -- they time the step
  local after, _, count, rows = core.times(), core.shard(self.rows, self.shard, self.grain)
  spent.inside = spent.inside + (core.clock() - started)
  spent.waited = spent.waited + (ranks.waited() - waited)
  spent.backward = spent.backward + (after.backward - before.backward)
  spent.optimizer = spent.optimizer + (after.optimizer - before.optimizer)
  return self.mode:add_loss(loss, given, count, rows)
end

-- Ends a step after its last shard. settle() saves and stops later. Returns the loss of the batch.
local function end_step(self, loss)
  ending.close_step(self)
  if core.steps() == self.counter then
    fail("run:step: the function took no optimizer step; use lt.micro_batches to accumulate "
         .. "gradients")
  end
  optims.end_step(self)
  return self.mode:end_step(loss)
end

-- run:step(fn, ...): one training step. Calls fn(...) as lt.step does. fn runs the forward and
-- backward pass, takes the optimizer's step and returns the loss, a mean over the batch. run:step
-- then logs, saves if due and stops if requested. Returns the loss as a number; with --vranks, the
-- shard's loss until the last shard of the batch. On an accelerator, a loss that fn returned as a
-- tensor is returned unchanged, without waiting for it.
function Run:step(fn, ...)
  expect(self, "epoch", "run:step", "call it inside: for x, y in run:batches() do ... end")
  if type(fn) ~= "function" then fail("run:step requires a function, but got %s", tostring(fn)) end
  if not self.rows then fail("run:step: each batch of run:batches has exactly one step") end
  if self.shard == 1 then
    local o = self.settings
    if o.trial then o.amp = o.trial:precision() end
    self.rate = set_rate(self, self.rows)
    if o.amp_check then ending.close_step(self) end
    amp_check.begin_step(self, fn, ...)
    self.stepped = {}
    self.spent = {inside = 0.0, waited = 0.0, backward = 0.0, optimizer = 0.0,
                  sent = ranks.sent()}
    self.mode:begin_step()
    if self.observer then self.observer:begin_step() end
  end
  local loss, given = step_shard(self, fn, ...)
  if self.shard == self.shards then
    loss = end_step(self, loss)
    return type(loss) == "number" and loss or given
  end
  self.rows, self.is_partial = false, true
  return given
end

-- run:mixup(x, y): lt.mixup with the run's setting `mixup` as alpha. The setting also makes the run
-- keep pairs of images on one rank. For use in the function of run:step.
function Run:mixup(x, y)
  return mixup(x, y, self.settings.mixup)
end

-- ==== Evaluation and report ======================================================================

-- run:evaluate(set[, {batch = , loss = , metrics = }]): returns {loss = , top1 = } of the net in
-- eval mode over the set, each sample counted once. batch defaults to the training batch, which
-- needs no more memory than training. loss defaults to the run's setting `loss`, then to cross
-- entropy. If that is not the training's loss, because the step does not call lt.cross_entropy, the
-- result has it as cross_entropy instead of loss, so that the log never mixes two losses. metrics:
-- see metrics.lua. Resizes images to the phase's size.
-- A stop ends it, unless the script has changed something since the end of the loop: a resumed run
-- would change it twice. Then the stop waits.
function Run:evaluate(set, given)
  check_call(self, "run:evaluate")
  local before, o = core.clock(), self.settings
  local other = self.mode:begin_evaluation(given)
  if other then return other end
  ending.close_step(self)
  local like = {mode = self.mode, batch = self.phase.batch, size = self.phase.size, amp = o.amp,
                loss = o.loss, other_loss = self.other_loss,
                stop_waits = not self.is_settled or state.mark(self) ~= self.mark_of_state}
  local _ <close> = state.hold(self)
  local result = evaluate(o.net, set, given, like, function(reason, waits)
    self.stop = reason or self.stop
    if not waits then stop_if_wanted(self) end
  end)
  ending.exclude_time_since(self, before)
  progress.warn_of_result(self, result)
  return result
end

-- run:report(numbers): ends the epoch. Logs it with numbers, a table by name like the result of
-- run:evaluate. Saves a checkpoint. Returns the report: the numbers and train_loss.
function Run:report(numbers)
  expect(self, "epoch", "run:report",
         self.status == "reported" and "this epoch was already reported"
         or "call it inside: for epoch in run:epochs() do ... end")
  expect_whole_batch(self, "run:report")
  self.mode:check_report()
  progress.check_report(numbers)
  settle(self)
  local before = core.clock()
  ending.close_step(self)
  self.epoch_s = self.epoch_s + (core.clock() - before)          -- the last steps may end here
  self.mode:compare_step()
  agree.epoch(self)
  state.check_weights(self)
  ending.close_loader(self)
  local fields, result = {}, {train_loss = self.loss_sum / self.done}
  for name, value in pairs(numbers or {}) do
    fields[name == "loss" and "test_loss" or name], result[name] = value, value
  end
  fields.epoch, fields.epochs, fields.size = self.epoch, self.settings.epochs, self.phase.size
  fields.step, fields.samples = self.mode:end_of_epoch()
  fields.loss, fields.wall_s = result.train_loss, self.epoch_s
  fields.samples_per_s = self.epoch_images / self.epoch_s
  self.log:epoch(fields, progress.skipped(self))
  self.mode:forget_epoch()
  self.result, self.status = result, "reported"
  self.epoch, self.done, self.loss_sum = self.epoch + 1, 0, 0.0
  self.epoch_s, self.epoch_images, self.saved = 0.0, 0, false
  ending.save_or_warn(self)
  self.mark_of_state = state.mark(self)
  return result
end

-- Saves a checkpoint now.
function Run:save()
  check_call(self, "run:save")
  ending.close_step(self)
  state.check_weights(self)
  ending.save_or_warn(self)
end

return new
