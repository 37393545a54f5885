-- pipe_planner.lua - finds the fastest pipeline for a net: profiles it, measures the link between
-- the ranks, and predicts a step of each plan; see dist/plan.h.

local core = ...
local json = require "luatrain.json"
local options = require "luatrain.train.pipe_options"

local planner = {}

local PASSES = 2                         -- timed passes for each size of a micro-batch
local NORM_IMAGES = 8                    -- least images of a micro-batch with batch norm
local SMALL, LARGE = 1, 1 << 21         -- elements of the timed sums
local MESSAGE_BYTES = 4 << 20
local KINDS = {gpipe = 0, ["1f1b"] = 1, zb = 2}

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

-- ==== The net ====================================================================================

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
  local all, optimizer = 0, 0.0
  net.n_sizes = #net.sizes
  for i, unit in ipairs(dry.units) do
    all = all + unit.grad_bytes
    net.units[i] = {name = unit.name, may_begin_stage = unit.may_begin_stage,
                    grad_bytes = unit.grad_bytes, saved_bytes = unit.saved_bytes / dry.rows,
                    state_bytes = unit.state_bytes + 2 * unit.grad_bytes,   -- gradients, momentum
                    forward = {}, inputs = {}, weights = {}}
  end
  for i, value in ipairs(dry.values) do
    net.values[i] = {unit = value.unit, uses = value.uses, bytes = value.bytes / dry.rows,
                     tracked = value.tracked}
  end
  for k, size in ipairs(net.sizes) do
    local profile = json.read(core.run_profile(PASSES, size))
    if #profile.units ~= #net.units then
      refuse "--parallel pipe=P: the script makes another net each time; use cut=NAME"
    end
    add_times(net, k, profile)
    optimizer = profile.optimizer
  end
  for _, unit in ipairs(net.units) do
    unit.update = all > 0 and optimizer * unit.grad_bytes / all or 0.0
  end
  net.units[1].inputs = {0, 0, 0}          -- images have no gradient
  return net
end

-- Lets stages begin only at the cuts that the user has named.
local function fix_cuts(net, dry, cuts)
  for _, unit in ipairs(net.units) do unit.may_begin_stage = false end
  for _, i in ipairs(options.cuts(dry, cuts)) do net.units[i].may_begin_stage = true end
end

-- The number of micro-batches that the user has given, or nil. Each has at least one image.
local function micro_of(o, batch)
  return o.micro and math.min(o.micro, math.max(batch // (o.data or 1), 1))
end

-- ==== The link ===================================================================================

local function least_of(list) return list and math.min(table.unpack(list)) or 0.0 end

-- Measures messages and sums between the ranks.
local function measure_links(ranks)
  if ranks == 1 then
    local any = {latency = 1e-6, bytes_per_s = 1e9}
    return any, any
  end
  local short, long = core.time_message(0), core.time_message(MESSAGE_BYTES)
  local small, large = least_of(core.time_sums(SMALL, 5)), least_of(core.time_sums(LARGE, 3))
  local bytes = 2 * (ranks - 1) / ranks * LARGE * select(2, core.wire())
  return {latency = short, bytes_per_s = MESSAGE_BYTES / math.max(long - short, 1e-9)},
         {latency = small / (2 * ranks - 1), bytes_per_s = bytes / math.max(large - small, 1e-9)}
end

-- ==== Plans ======================================================================================

-- Whether a plan is offered: it uses all ranks. With one stage, they do not divide their part of
-- the batch unless the user gives micro.
local function is_usable(plan, ranks, micro)
  return plan.stages * plan.replicas == ranks and (plan.stages > 1 or plan.micro == 1 or micro)
end

-- Returns the plans for `ranks` ranks, the fastest first, the job and the net. o: the options of
-- pipe_options.lua; dry: the dry profile; link: both links, or nil to measure them.
function planner.find(o, dry, ranks, link)
  if not dry.batch then
    refuse "--parallel pipe=P: the script has no batch of its own; name the cuts with cut=NAME"
  end
  local least = dry.has_batch_norm and NORM_IMAGES or 1
  local net = make_net(dry, least, dry.batch)
  if #o.cut > 0 then fix_cuts(net, dry, o.cut) end
  local messages, sums = measure_links(core.ranks())
  local job = {ranks = ranks, batch = dry.batch, link = link or messages, exchange = link or sums,
               wire_bytes = select(2, core.wire()), least_micro = least, stages = o.pipe,
               replicas = o.data, micro = micro_of(o, dry.batch), lag = o.lag,
               kind = o.schedule and KINDS[o.schedule], memory = o.memory}
  local plans = {}
  local ok, found = pcall(core.find_plans, net, job)
  if not ok then refuse("--parallel: %s", (tostring(found):gsub("^[^ ]*:%d+: ", ""))) end
  for _, plan in ipairs(found) do
    if is_usable(plan, ranks, o.micro) then
      plan.images_per_s, plan.cuts = dry.batch / plan.seconds, {}
      for i = 2, plan.stages do plan.cuts[i - 1] = net.units[plan.stage[i].first].name end
      plans[#plans + 1] = plan
    end
  end
  if #plans == 0 then refuse("--parallel: there is no pipeline of %d ranks for this net", ranks) end
  return plans, job, net
end

return planner
