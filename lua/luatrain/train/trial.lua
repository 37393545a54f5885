-- trial.lua - amp = "auto": the first steps of a run are steps as any others, in each precision in
-- turn; then the faster one is kept.

local core = ...

local trial = {}

local Trial = {}
local meta = {__name = "luatrain.Trial", __index = Trial}

local PRECISIONS = {"off", "bf16"}
-- Which of them each step has. The first two of each are not counted, as memory and plans are made
-- in them; what else changes from step to step is shared out.
local ORDER, WARM_UP = {1, 2, 1, 2, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2}, 4
local LEAST = 0.05      -- of the time is to be saved, or it is not worth the rounding

-- The trial of a run with settings o; false: there is none. Until it is over, o.amp is that of the
-- step.
function trial.begin(o)
  if o.amp ~= "auto" then return false end
  if core.deterministic() then
    core.fail("EUSAGE", "amp auto takes what turns out to be faster, which need not be the same "
              .. "each time; --deterministic wants off, bf16 or fp16")
  end
  o.amp = "off"
  return setmetatable({done = 0, seconds = {{}, {}}}, meta)
end

-- That of the next step.
function Trial:precision() return PRECISIONS[ORDER[self.done + 1]] end

local function median(list)
  table.sort(list)
  return list[(#list + 1) // 2]
end

local function short(ms) return (ms < 100 and "%.3g" or "%.0f"):format(ms) end

-- A step took so long. nil, or after the last one which precision it is to be, on all ranks, what
-- each takes in milliseconds, and a line that says so.
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
