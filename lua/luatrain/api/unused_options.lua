-- unused_options.lua - warns about options that only lt.run and lt.fit fully apply, if the script
-- calls neither.

local core = ...
local command_line = require "luatrain.command_line"

local unused_options = {run = false, scaler = false}     -- whether the script has made one

-- Returns an option as the user gave it, "--amp bf16" or "LUATRAIN_AMP=bf16", and its value; nil if
-- it was not given.
local function given(flag, variable)
  local value = command_line.variable(variable)
  if not value then return nil end
  return command_line.has(flag) and flag .. " " .. value or variable .. "=" .. value, value
end

local function say(...)
  if core.rank() == 0 then
    io.stderr:write("luatrain: warning: ", string.format(...), "\n")
  end
end

-- Called after the script.
function unused_options.warn()
  if unused_options.run then return end
  local amp, precision = given("--amp", "LUATRAIN_AMP")
  local steps = core.steps()
  if precision == "auto" then
    say("%s applies only to lt.run and lt.fit; the script called neither, so it ran in f32", amp)
  elseif precision == "fp16" and steps > 0 and not unused_options.scaler then
    say("%s: without lt.run or lt.fit, the script trained %d step%s with no loss scale; add local "
        .. "scaler <close> = lt.amp.scaler{} to its loop", amp, steps, steps == 1 and "" or "s")
  end
  if command_line.variable "LUATRAIN_SHARE" == "auto" then
    say("%s applies only to lt.run and lt.fit; the script called neither, so the ranks had equal "
        .. "shares", (given("--share", "LUATRAIN_SHARE")))
  end
  local amp_check = given("--amp-check", "LUATRAIN_AMP_CHECK")
  if amp_check then
    say("%s applies only to lt.run and lt.fit; the script called neither; use lt.amp.check in its "
        .. "own loop", amp_check)
  end
end

return unused_options
