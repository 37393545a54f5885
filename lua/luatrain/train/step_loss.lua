-- step_loss.lua - the loss of a step over the shards, micro-batches, stages and ranks of its batch.
-- The exchange of the losses also carries requests to stop and, in a pipeline, what else all stages
-- must learn in each step.

local core = ...
local check = require "luatrain.check"
local ending = require "luatrain.train.ending"
local pipeline = require "luatrain.train.pipeline"
local ranks = require "luatrain.train.ranks"

local step_loss = {}

local function product(a, b) return a * b end

-- In a pipeline: this rank's part of the loss of a micro-batch, times its share.
function step_loss.share_of(given, share)
  if core.is_tensor(given) then given = core.step(core.no_grad, product, given, share) end
  local loss = pipeline.own(given, function(value)
    return check.number(value, "run:step: the function", "the loss")
  end)
  return core.is_tensor(given) and loss or loss * share
end

-- In a pipeline: the loss of the batch. Sets `stop` if a rank has requested it, and `save_due`.
-- Raises an error if optimizers of stages have other settings.
local function loss_of_stages(run)
  local _, _, rows = core.shard(run.rows, 1, run.grain)
  local _, signal = core.stop_reason()
  local loss = 0.0
  for part = 1, run.shards do loss = loss + run.losses[part] end
  local times = pipeline.times(run.spent)
  local own = {loss * (rows / run.rows), signal or 0, signal and 1 or 0,
               run.root and ending.is_save_due(run, true) and 1 or 0,
               times.forward, times.backward, times.weights, times.waiting,
               core.settings_digest()}
  local digest = pipeline.add_writes(own)
  local all, list, same = {0.0, 0.0, 0.0, 0.0}, ranks.gather("the step", own), true
  for i = 1, #list, #own do
    for k = 1, #all do all[k] = all[k] + list[i + k - 1] end
    same = same and list[i + digest - 1] == list[digest]
  end
  if not same then core.compare_step() end
  pipeline.check_writes(list, #own)
  run.spent.own, run.spent.stages = times, {}
  local _, stages, _, replicas = core.pipeline()
  for stage = 1, stages do            -- takes the times of its first replica
    local first = (stage - 1) * replicas * #own + #all + 1
    run.spent.stages[stage] = table.move(list, first, first + 3, 1, {})
  end
  run.stop = all[3] > 0 and core.stop_reason(math.tointeger(all[2] // all[3])) or false
  run.save_due = all[4] > 0
  return all[1]
end

-- The loss of the batch over all ranks. Sets `stop` if a rank requested it in this step's exchange.
function step_loss.of_all(run, loss)
  if core.pipeline() then return loss_of_stages(run) end
  if run.alone then return loss end
  local _, _, _, signal = core.reduced()
  run.stop = core.stop_reason(signal) or false
  return ranks.sum_shards("the loss", run.losses)
end

return step_loss
