-- pipe_planner.lua - finds the fastest pipeline for a net: profiles it, measures the link between
-- the ranks, and predicts a step of each plan; see dist/plan.h.

local core = ...
local json = require "luatrain.json"
local options = require "luatrain.train.pipe_options"

local planner = {}

local PASSES = 2                         -- timed passes for each size of a micro-batch
local NORM_IMAGES = 8                    -- least images of a micro-batch with batch norm
local SMALL, LARGE = 1, 1 << 20         -- elements of the timed sums
local MESSAGE_BYTES = 4 << 20

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

-- ==== The net ====================================================================================

-- Ends the script because it called os.exit() in a profile. With code 0 that is an error, because
-- the training that the script does before its os.exit() has not been done.
function planner.leave(exit, why)
  local text = exit.text .. " in the profile for --parallel pipe=P, " .. why
  if exit.code > 0 then core.exit(exit.code, text) end
  refuse("%s", text)
end

-- The dry profile of the script. nil if the script exits before its first backward pass on all
-- ranks; planner.exit then has the exit code and message.
function planner.profile()
  local profile, rank, ranks = json.read(core.run_profile(0, 0)), core.job_rank()
  planner.exit = profile.exit
  local exits = core.sum("the profile", profile.exit and 1 or 0)
  if profile.exit and exits < ranks then
    planner.leave(profile.exit, ("but only on rank %d"):format(rank))
  end
  return not profile.exit and profile or nil
end

-- The sizes of micro-batches to time: the least one, twice and four times it, up to the batch.
local function sizes_for(least, batch)
  local sizes = {}
  for _, size in ipairs{least, 2 * least, 4 * least} do
    if size <= batch then sizes[#sizes + 1] = size end
  end
  return #sizes > 0 and sizes or {batch}
end

-- Adds the seconds of a timed profile to the units of net, for its k-th size. A pass takes longer
-- than its ops, so the seconds are scaled to the time of the whole pass.
local function add_times(net, k, profile)
  for _, kind in ipairs{"forward", "inputs", "weights"} do
    local ops = 0.0
    for _, unit in ipairs(profile.units) do ops = ops + unit[kind] end
    local factor = ops > 0 and profile[kind] / ops / PASSES or 0.0
    for i, unit in ipairs(profile.units) do net.units[i][kind][k] = unit[kind] * factor end
  end
end

-- The net for core.find_plans(): the dry profile with times. batch: images of a step.
local function make_net(dry, least, batch)
  local net = {units = {}, values = {}, sizes = sizes_for(least, batch)}
  local all, optimizer, slots = 0, 0.0, nil
  local works = core.device() == "cpu"       -- oneDNN cannot add to gradients of weights
  net.n_sizes = #net.sizes
  for i, unit in ipairs(dry.units) do
    all = all + unit.grad_bytes
    net.units[i] = {name = unit.name, may_begin_stage = unit.may_begin_stage,
                    grad_bytes = unit.grad_bytes, saved_bytes = unit.saved_bytes / dry.rows,
                    back_bytes = unit.back_bytes / dry.rows,
                    work_bytes = works and unit.grad_bytes or 0.0,
                    forward = {}, inputs = {}, weights = {}}
  end
  for i, value in ipairs(dry.values) do
    net.values[i] = {unit = value.unit, uses = value.uses, bytes = value.bytes / dry.rows,
                     tracked = value.tracked}
  end
  for k, size in ipairs(net.sizes) do
    local profile = json.read(core.run_profile(PASSES, size))
    if profile.exit then
      planner.leave(profile.exit, "which takes several steps; use cut=NAME to train without it")
    elseif #profile.units ~= #net.units then
      refuse "--parallel pipe=P: the script makes another net each time; use cut=NAME"
    end
    add_times(net, k, profile)
    optimizer, slots = profile.optimizer, profile.slot_bytes
  end
  for i, unit in ipairs(net.units) do
    local share = all > 0 and unit.grad_bytes / all or 0.0
    unit.update = optimizer * share
    unit.state_bytes = dry.units[i].state_bytes + unit.grad_bytes + (slots or all) * share
  end
  return net
end

-- Lets stages begin only at the cuts that the user has named.
local function fix_cuts(net, dry, cuts)
  for _, unit in ipairs(net.units) do unit.may_begin_stage = false end
  for _, i in ipairs(options.cuts(dry, cuts)) do net.units[i].may_begin_stage = true end
end

-- ==== The link ===================================================================================

-- Measures messages and sums between the ranks. A rank that begins a small sum late measures too
-- short a time, so the latency is from the median.
local function measure_links(ranks)
  if ranks == 1 then
    local any = {latency = 1e-6, bytes_per_s = 1e9}
    return any, any
  end
  local short, long = core.time_message(0), core.time_message(MESSAGE_BYTES)
  local sums = core.time_sums(SMALL, 9)
  table.sort(sums)
  local small, large = sums[5], math.min(table.unpack(core.time_sums(LARGE, 7)))
  local bytes = 2 * (ranks - 1) / ranks * LARGE * select(2, core.wire())
  return {latency = short, bytes_per_s = MESSAGE_BYTES / math.max(long - short, 1e-9)},
         {latency = small / (2 * ranks - 1), bytes_per_s = bytes / math.max(large - small, 1e-9)}
end

-- ==== Plans ======================================================================================

-- Whether a plan can be chosen: one stage has one micro-batch, unless the user gives micro.
local function is_usable(plan, micro) return plan.stages > 1 or plan.micro == 1 or micro end

-- The job for core.find_plans(); see planner.find().
local function job_of(o, dry, ranks, link)
  local images = math.max(dry.batch // (o.data or 1), 1)      -- of a replica
  local messages, sums = link, link
  if not link then messages, sums = measure_links(select(2, core.job_rank())) end
  return {ranks = ranks, batch = dry.batch, link = messages, exchange = sums,
          wire_bytes = select(2, core.wire()), stages = o.pipe, replicas = o.data,
          least_micro = dry.has_batch_norm and math.min(NORM_IMAGES, images) or 1,
          micro = o.micro and math.min(o.micro, images), lag = o.lag,
          schedule = o.schedule, memory = o.memory}
end

-- On rank 0, returns the plans for `ranks` ranks, the fastest first, the job and the net; on other
-- ranks, nothing. All ranks must call it. o: the options of pipe_options.lua; dry: the dry profile;
-- link: the link for messages and sums, or nil to measure it.
function planner.find(o, dry, ranks, link)
  if not dry.batch then
    refuse "--parallel pipe=P: the planner cannot find the batch size; name the cuts with cut=NAME"
  end
  local job = job_of(o, dry, ranks, link)
  local net = make_net(dry, job.least_micro, dry.batch)
  if #o.cut > 0 then fix_cuts(net, dry, o.cut) end
  if core.rank() > 0 then return end
  local found, why = core.find_plans(net, job)
  if not found then refuse("--parallel: %s", (why:gsub("^planning: ", ""))) end
  local plans = {}
  for _, plan in ipairs(found) do
    if is_usable(plan, o.micro) then
      plan.images_per_s, plan.cuts = dry.batch / plan.seconds, {}
      for i = 2, plan.stages do plan.cuts[i - 1] = net.units[plan.stage[i].first].name end
      plans[#plans + 1] = plan
    end
  end
  if #plans == 0 then
    refuse("--parallel: there is no pipeline of %d rank%s for this net", ranks,
           ranks == 1 and "" or "s")
  end
  return plans, job, net
end

return planner
