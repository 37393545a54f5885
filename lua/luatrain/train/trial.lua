-- trial.lua - amp = "auto": the first steps of a run use the precisions in turn; the rest of the
-- run uses the faster one. The first steps are ordinary training steps.

local core = ...
local median = require "luatrain.median"

local trial = {}

local Trial = {}
local meta = {__name = "luatrain.Trial", __index = Trial}

local PRECISIONS = {"off", "bf16"}
-- The precision of each step. The first two steps of each precision are not timed, because they
-- allocate memory and make plans. The order is balanced, so that drift affects both equally.
local ORDER, WARM_UP = {1, 2, 1, 2, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2}, 4
local LEAST = 0.05      -- fraction of the time that bf16 must save to be worth its rounding

-- The trial of a run with settings o, or false unless o.amp is "auto". During the trial, o.amp is
-- the precision of the current step.
function trial.begin(o)
  if o.amp ~= "auto" then return false end
  if core.deterministic() then
    core.fail("EUSAGE", "amp auto chooses the faster precision, which may differ from run to run; "
              .. "--deterministic requires off, bf16 or fp16")
  end
  o.amp = "off"
  return setmetatable({done = 0, seconds = {{}, {}}}, meta)
end

-- The precision of the next step.
function Trial:precision() return PRECISIONS[ORDER[self.done + 1]] end

local function short(ms) return (ms < 100 and "%.3g" or "%.0f"):format(ms) end

-- Records the time of a step. After the last step of the trial, returns the choice, the same on all
-- ranks, as {amp = , off_ms = , bf16_ms = }, and a line for the log; before that, nil.
function Trial:end_step(seconds)
  self.done = self.done + 1
  if self.done > WARM_UP then table.insert(self.seconds[ORDER[self.done]], seconds) end
  if self.done < #ORDER then return end
  local _, ranks = core.rank()
  local off, bf16 = core.sum("a trial of precisions", median(self.seconds[1]),
                             median(self.seconds[2]))
  off, bf16 = 1000 * off / ranks, 1000 * bf16 / ranks
  local choice = bf16 <= (1 - LEAST) * off and "bf16" or "off"
  return {amp = choice, off_ms = off, bf16_ms = bf16},
         ("amp auto: %s; a step takes %s ms in f32 and %s in bf16")
         :format(choice, short(off), short(bf16))
end

return trial
