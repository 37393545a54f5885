-- overrides.lua - the settings of a run from the environment; they override the script's. The
-- option `luatrain --out X` sets the variable LUATRAIN_OUT=X.

local core = ...
local check = require "luatrain.check"
local checkpoint = require "luatrain.train.checkpoint"
local command_line = require "luatrain.command_line"
local text_of = command_line.variable
local run_folder = require "luatrain.train.run_folder"
local unused_options = require "luatrain.api.unused_options"

local function fail(...) core.fail("EUSAGE", string.format(...)) end

local function count_of(name)
  local text = text_of(name)
  local number = text and text:find "^%d+$" and math.tointeger(text)
  if text and (not number or number < 1) then
    fail("%s must be a positive integer, but is '%s'", name, text)
  end
  return number
end

local function choice_of(name, words)
  local text = text_of(name)
  for _, word in ipairs(words) do
    if text == word then return text end
  end
  if text then
    local first = table.concat(words, ", ", 1, #words - 1)
    fail("%s must be %s or %s, but is '%s'", name, first, words[#words], text)
  end
end

-- A path without trailing slashes: "runs/x" for "runs/x/".
local function folder(path) return path and (path:gsub("(.)/+$", "%1")) end

-- The name of the setting that max_steps comes from, for messages.
local function source_of_max_steps(is_override)
  if not is_override then return "max_steps" end
  return command_line.has "--max-steps" and "--max-steps" or "LUATRAIN_MAX_STEPS"
end

-- Whether luatrain launch --restarts has started this job again, and an earlier start has saved a
-- checkpoint of this run. The run then resumes from that, whatever --resume says about the first
-- start. LUATRAIN_RESTARTED is the number of runs that earlier starts have begun: the folder of a
-- later run may have checkpoints of another job.
local function has_own_checkpoint(o)
  local number = run_folder.runs() + 1
  if not o.out or number > (tonumber(text_of "LUATRAIN_RESTARTED") or 0) then return false end
  local own = o.out_is_the_scripts and o.out or run_folder.of(o.out, number)
  return checkpoint.newest_step(own) > (checkpoint.is_path(o.resume)
                                        and checkpoint.step_of(o.resume) or 0)
end

-- Applies the overrides to the settings o of the script's next run: out, resume, save_every,
-- max_steps, check_sync, amp_check, amp, log and quiet. resume is false if neither it nor out is
-- set: the run then gets a new folder. amp defaults to the precision of an enclosing lt.autocast.
return function(o)
  unused_options.run = true
  local out, max_steps = text_of "LUATRAIN_OUT", count_of "LUATRAIN_MAX_STEPS"
  o.out_is_the_scripts = not out and o.out ~= nil
  o.out = folder(out or o.out)
  o.resume = folder(text_of "LUATRAIN_RESUME" or o.resume) or o.out and "auto" or false
  if has_own_checkpoint(o) then o.resume = "auto" end
  o.save_every = count_of "LUATRAIN_SAVE_EVERY" or o.save_every
  o.max_steps, o.max_steps_from = max_steps or o.max_steps, source_of_max_steps(max_steps)
  o.check_sync = count_of "LUATRAIN_CHECK_SYNC"
  o.amp_check = count_of "LUATRAIN_AMP_CHECK"
  o.amp = choice_of("LUATRAIN_AMP", check.precisions) or o.amp or core.amp()
  if o.amp_check and o.amp == "off" then
    fail "--amp-check N compares half precision with f32; it requires --amp bf16, fp16 or auto"
  end
  o.log = choice_of("LUATRAIN_LOG", {"text", "json"}) or "text"
  o.quiet = choice_of("LUATRAIN_QUIET", {"0", "1"}) == "1"
  return o
end
