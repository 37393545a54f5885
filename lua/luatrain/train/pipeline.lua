-- pipeline.lua - training in a pipeline: --parallel pipe=P. Each rank has a stage of the net; see
-- dist/pipeline.h.

local core = ...
local options = require "luatrain.train.pipe_options"

local pipeline = {}

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

-- Starts the pipeline of this rank, before the script places parameters.
function pipeline.begin()
  local o = options.read()
  if #o.cuts ~= o.pipe - 1 then
    refuse("--parallel pipe=%d requires cut=NAME for each stage but the first", o.pipe)
  end
  core.open_pipeline(o.cuts, o.schedule, o.lag, o.micro)
end

-- EUSAGE if a run with settings o cannot train in a pipeline. Called once the net has memory.
function pipeline.check(o)
  local cut = core.missed_cut()
  if not core.pipeline() then return end
  if o.amp == "auto" then
    refuse "--amp auto cannot be combined with --parallel pipe=P; choose off, bf16 or fp16"
  elseif o.amp_check then
    refuse "--amp-check cannot be combined with --parallel pipe=P"
  elseif o.check_sync then
    refuse "--check-sync cannot be combined with --parallel pipe=P"
  elseif cut then
    refuse("--parallel: no parameter or module '%s' follows the earlier cuts; `luatrain summary` "
           .. "lists the modules", cut)
  end
end

-- What this rank contributes to the sum of a value over all ranks. value is a number or a tensor of
-- one element; read(value) checks it and returns a number. One stage of each replica contributes a
-- tensor, the first one a number, and the others 0.
function pipeline.own(value, read)
  local stage = core.pipeline()
  if not stage then return read(value) end
  if not core.is_tensor(value) then return stage == 0 and read(value) or 0.0 end
  if not core.counts(value) then return 0.0 end
  return read(value:count() == 1 and core.own_item(value) or value)
end

return pipeline
