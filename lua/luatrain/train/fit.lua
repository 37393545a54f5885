-- fit.lua - lt.fit, a whole training run in one call, and lt.micro_batches, which splits a batch.
--
--   lt.fit{net = net, train = train, test = test, optim = sgd, epochs = 10, batch = 128}

local core = ...
local check = require "luatrain.check"
local deferred = require "luatrain.api.deferred"
local lone_rows = require "luatrain.train.lone_rows"
local metrics = require "luatrain.api.metrics"
local new_run = require "luatrain.train.run"
local shape_of = require "luatrain.train.state".shape_of
local ops = core.ops

local exports = {}

local function fail(code, ...) core.fail(code, string.format(...)) end

local micro_batches = check "lt.micro_batches{k, x:tensor, y:tensor}"

-- for x_i, y_i, share in lt.micro_batches(k, x, y) do ... end: splits a batch into k micro-batches,
-- or fewer, so that none is empty. share is the micro-batch's fraction of the samples: the sum of
-- loss * share over the micro-batches is the loss of the whole batch, and so are the gradients.
-- Random ops in the net draw the same numbers as in one pass over the whole batch. All shards of a
-- batch are split into the same number of micro-batches, because in some nets, as with
-- nn.sync_batch_norm, ranks wait for each other in each pass.
function exports.micro_batches(k, x, y)
  k, x, y = micro_batches:value("k", k), micro_batches:value("x", x), micro_batches:value("y", y)
  local rows = x:dim(1)
  if y:dim(1) ~= rows then
    fail("EINVAL", "lt.micro_batches: x has %d samples, but y has %d", rows, y:dim(1))
  end
  local n, i, last = math.min(k, core.least_rows(rows)), 0, 0
  core.expect_backwards(n)
  return function()
    if i == n then return nil end
    local first = last + 1
    i, last = i + 1, (rows * (i + 1) + n - 1) // n
    core.take_micro_batch(i, n)
    core.set_first_row(first - 1)
    lone_rows.divide(n, last - first + 1)
    return ops.slice(x, 1, first, last), ops.slice(y, 1, first, last), (last - first + 1) / rows
  end
end

local spec = check("lt.fit{net:net, train:set, test:set, optim:optims, epochs, batch; loss?:call, "
                   .. "label_smoothing=0.0, metrics?:metrics, schedule?:call, augment?:options, "
                   .. "mixup:amount=0.0, sizes?:list, target?:share, accumulate:count=1, "
                   .. "eval_batch?, workers?:integer, out?:path, resume?:path, save_every?, "
                   .. "max_steps?, amp?:amp, scaler?:options}")

-- Raises EDATA unless the images of both sets have the same shape and the test set has no more
-- classes than the training set.
local function check_sets(train, test)
  if shape_of(train) ~= shape_of(test) then
    fail("EDATA", "lt.fit: the images of the test set are %s, but those of the training set are %s",
         shape_of(test), shape_of(train))
  elseif test.classes > train.classes then
    fail("EDATA", "lt.fit: the test set has %d classes, but the training set has %d", test.classes,
         train.classes)
  end
end

-- Trains net and returns the last report: {top1 = , loss = , train_loss = }. accumulate = k splits
-- each batch into k micro-batches, which saves memory and gives the same step. mixup, sizes, target
-- and scaler are as in lt.run, metrics as in run:evaluate.
function exports.fit(given)
  local o = spec(given)
  if o.loss and o.label_smoothing ~= 0 then
    fail("EINVAL", "lt.fit: label_smoothing applies only to lt.fit's own loss, not to a function "
                   .. "'loss'")
  end
  check_sets(o.train, o.test)
  metrics.read(o.metrics, "lt.fit")      -- before the first epoch
  core.compare("lt.fit", ("accumulate = %d\nlabel_smoothing = %.9g\neval_batch = %s")
                         :format(o.accumulate, o.label_smoothing, o.eval_batch))
  local function loss_of(logits, y)
    if not o.loss then return ops.cross_entropy(logits, y, o.label_smoothing) end
    local loss = o.loss(logits, y)
    if not core.is_tensor(loss) or loss:count() ~= 1 then
      fail("EINVAL", "lt.fit: 'loss' must return a tensor of one number, but returned %s",
           check.described(loss))
    end
    return loss
  end
  -- The loss of logits for images with labels y, mixed with images with labels `others`. kept is
  -- the weight of y; 1 means unmixed.
  local function mixed_loss(logits, y, others, kept)
    local loss = loss_of(logits, y)
    return kept == 1 and loss or loss * kept + loss_of(logits, others) * (1 - kept)
  end
  local function learn(run, x, y)
    local losses, first = {}, 1
    local mixed, others, kept = run:mixup(x, y)
    for x_i, y_i, share in exports.micro_batches(o.accumulate, mixed, y) do
      local last = first + y_i:dim(1) - 1
      local others_i = ops.slice(others, 1, first, last)
      first = last + 1
      losses[#losses + 1] = core.step(function()
        local loss = mixed_loss(o.net(x_i), y_i, others_i, kept) * share
        local taken = deferred.take(loss)
        loss:backward()
        return taken
      end)
    end
    for _, optim in ipairs(o.optim) do optim:step() end
    return deferred.sum(losses)
  end

  local run <close> = new_run{
    net = o.net, optim = o.optim, train = o.train, epochs = o.epochs, batch = o.batch,
    schedule = o.schedule, augment = o.augment, mixup = o.mixup, sizes = o.sizes,
    target = o.target, workers = o.workers, out = o.out, resume = o.resume,
    save_every = o.save_every, max_steps = o.max_steps, amp = o.amp,
    scaler = o.scaler, loss = o.loss or ops.cross_entropy}
  lone_rows.refuse(run)
  for _ in run:epochs() do
    for x, y in run:batches() do run:step(learn, run, x, y) end
    local eval_batch = o.eval_batch or (run.phase.batch - 1) // o.accumulate + 1
    run:report(run:evaluate(o.test, {batch = eval_batch, metrics = o.metrics}))
  end
  return run.result
end

return exports
