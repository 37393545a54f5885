-- lone_rows.lua - in training, batch norm requires more than one value per channel. If a rank,
-- shard or micro-batch gets a single image of the last batch of an epoch, batch norm over 1x1 maps
-- fails at the end of the first epoch. This file detects that in the first step.

local core = ...

local lone = {}

local refused = false          -- the run of lt.fit, which always reaches its last batch
local parts = 1                -- micro-batches of lt.micro_batches in this step
local rows = false             -- images of the current one; false outside of lt.micro_batches

-- Notes that lt.micro_batches divides a batch into k parts, and yields one of n images.
function lone.divide(k, n) parts, rows = k, n end

function lone.refuse(run) refused = run end

-- Whether the run reaches the last batch of its epoch before max_steps.
local function gets_to_the_end(run)
  local o = run.settings
  local left = (#o.train - run.done + run.phase.batch - 1) // run.phase.batch
  return run.steps + left <= (o.max_steps or math.huge)
end

local function text_of(run, last)
  local how, ranks, division = {}, run.mode:division()
  if ranks > 1 then how[1] = ranks .. " ranks" end
  how[#how + 1] = parts > 1 and "micro-batches" or division
  return ("batch_norm: the last batch of each epoch has %d of the %d images%s, which leaves one "
          .. "value per channel, but training requires more; change the batch size, or use "
          .. "nn.group_norm")
         :format(last, #run.settings.train,
                 #how > 0 and " for " .. table.concat(how, " and ") or "")
end

-- Called at the beginning of an epoch. Until lone.stop(), batch norm calls core.on_norm with its
-- inputs; those outside of run:step do not count.
function lone.watch(run)
  local last = #run.settings.train % run.phase.batch
  lone.stop()
  if last == 0 or core.on_run or not gets_to_the_end(run) then return end
  local least = core.smallest_shard(last, run.grain)
  core.on_norm = function(x, sync)
    if not run.inside then return end
    local _, here = core.shard(run.rows, run.shard, run.grain)
    local is_lone = sync and last == 1 or not sync and least // math.min(parts, least) == 1
    if not is_lone or x:count() // x:dim(-1) ~= (rows or math.max(here, 1)) then return end
    local text = text_of(run, last)
    lone.stop()
    if run == refused then core.fail("EINVAL", text) end
    run.log:warn(text)
  end
end

function lone.stop() core.on_norm, parts, rows = false, 1, false end

return lone
