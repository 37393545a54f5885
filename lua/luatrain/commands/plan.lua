-- plan.lua - prints what `luatrain plan` has found: a table of the pipelines into which the net of
-- a script can be divided, with the predicted time of a step.

local core = ...
local columns = require "luatrain.commands.bench".columns
local json = require "luatrain.json"
local variable = require "luatrain.command_line".variable

local SHOWN = 12               -- rows of the table
local HEAD = {"cut at", "stages", "replicas", "micro", "schedule", "s/step", "img/s", "idle", "MB",
              "sent MB", "summed MB", "sum s", "overlap"}

local function most(list, key)
  local value = 0.0
  for _, item in ipairs(list) do value = math.max(value, item[key]) end
  return value
end

-- The seconds in which the replicas of the slowest stage sum its gradients, and the fraction of it
-- that overlaps with passes. Empty without replicas.
local function sum_texts(p)
  local slowest = p.stage[1]
  if p.replicas == 1 then return "", "" end
  for _, stage in ipairs(p.stage) do
    if stage.exchange > slowest.exchange then slowest = stage end
  end
  if slowest.exchange == 0 then return "0", "" end
  local hidden = 1 - slowest.exposed / slowest.exchange
  return ("%.3g"):format(slowest.exchange), ("%.0f %%"):format(100 * hidden)
end

local function megabytes(bytes) return ("%.0f"):format(bytes / 1e6) end

local function row(p)
  local sum, overlap = sum_texts(p)
  return {table.concat(p.cuts, " "), tostring(p.stages), tostring(p.replicas), tostring(p.micro),
          p.stages > 1 and ("%s, %d"):format(p.schedule, p.lag) or "",
          ("%.3g"):format(p.seconds), ("%.3g"):format(p.images_per_s),
          ("%.0f %%"):format(100 * most(p.stage, "idle")), megabytes(most(p.stage, "peak_bytes")),
          megabytes(most(p.stage, "sent_bytes")), megabytes(most(p.stage, "exchanged_bytes")),
          sum, overlap}
end

-- The rows of the table: the fastest plan for each number of stages, replicas and each schedule.
local function rows_of(list)
  local rows, seen = {HEAD}, {}
  for _, p in ipairs(list) do
    local key = ("%d %d %s"):format(p.stages, p.replicas, p.schedule)
    if not seen[key] and #rows <= SHOWN then rows[#rows + 1] = row(p) end
    seen[key] = true
  end
  return rows
end

local function write(list, job, timed)
  local link, best = job.link, list[1]
  local form = "batch %d on %d rank%s, timed on %d; link %.3g Gbit/s, latency %.0f us\n\n"
  io.write(form:format(job.batch, job.ranks, job.ranks == 1 and "" or "s", timed,
                       link.bytes_per_s * 8e-9, link.latency * 1e6))
  io.write(columns(rows_of(list), 1), "\n\n")
  if best.replicas > 1 and best.stages > 1 then
    io.write(("The replicas of a stage sum its gradients during %s.\n"):format(
      job.delay == 1 and "the next step, which applies them" or "its last backward pass"))
  end
  if best.stages == 1 then
    return io.write(best.replicas > 1 and "Data parallelism is fastest.\n"
                    or "No pipeline is faster than one stage.\n")
  end
  io.write(("Train with: --parallel pipe=%d,data=%d,micro=%d,cut=%s,schedule=%s,lag=%d%s\n"):format(
    best.stages, best.replicas, best.micro, table.concat(best.cuts, ",cut="), best.schedule,
    best.lag, job.delay == 1 and ",delay=1" or ""))
end

-- Prints the plans, the fastest first, and writes them to plans.json in the folder of --out.
-- found: {plans =, job =, net =}; timed: the number of ranks that have measured.
return function(found, timed)
  write(found.plans, found.job, timed)
  local out = variable "LUATRAIN_OUT"
  if out then
    core.make_folder(out)
    core.write_file(out .. "/plans.json", json.text(found, 2) .. "\n")
  end
end
