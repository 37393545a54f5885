-- agree.lua - before training, checks that all ranks have the same program, data, net and
-- settings. dist/agree.c compares what may change from step to step.
--
-- Devices, threads, workers, folders and logs may differ between ranks and are not compared.

local core = ...
local command_line = require "luatrain.command_line"
local hooks = require "luatrain.hooks"
local optims = require "luatrain.train.optims"
local sorted = require "luatrain.keys"
local sources = require "luatrain.train.sources"

local agree = {}

local function is_alone() return select(2, core.rank()) == 1 end

local function text_of(value)
  return math.type(value) == "float" and ("%.9g"):format(value) or tostring(value)
end

-- ==== The program ================================================================================

local function script_text() return type(arg) == "table" and sources.read(arg[0]) or "" end

local compared = setmetatable({}, {__mode = "k"})            -- labels of files, sets -> true

-- Compares the text of a Lua file. Ignores differences in line endings, as Lua does. Escapes NUL,
-- where core.compare would stop.
local function compare_text(what, text)
  text = text:gsub("\r\n", "\n"):gsub("\n+$", ""):gsub("\0", "\\0")
  core.compare(what, text)
end

-- Compares the files that rank 0 has loaded since the last call. A rank that has not loaded a file
-- accepts it: a script may, for example, load code for plotting on rank 0 only.
local function compare_files()
  local labels = core.broadcast_text("the files of the script", table.concat(sorted(sources.texts),
      "\n"))
  for label in labels:gmatch "[^\n]+" do
    if not compared[label] then
      compared[label] = true
      local what, own = "the " .. label, sources.texts[label]
      local first = core.broadcast_text(what, own or "")
      compare_text(what, own or first)
    end
  end
end

local program_compared = false

local function compare_program()
  if not program_compared then
    program_compared = true
    core.compare("the version of luatrain", core.version)
    core.compare("the seed", tostring(core.seed()))
    core.compare("--amp", core.amp())
    compare_text("the script " .. command_line.script(), script_text())
  end
  compare_files()
end

-- ==== Optimizers =================================================================================

local function settings_text(settings)
  local lines = {}
  for i, name in ipairs(sorted(settings)) do
    lines[i] = ("%s = %s"):format(name, text_of(settings[name]))
  end
  return table.concat(lines, "\n")
end

local function trained(tensor) return tensor.on_tape and "" or ", frozen" end

-- Compares a new optimizer across all ranks. who: the name of its constructor; settings: a table by
-- name; parameters: a list of {name = , tensor = }.
function agree.optimizer(who, settings, parameters)
  local lines = {}
  for i, item in ipairs(parameters) do
    lines[i] = ("%s %s%s"):format(item.name, core.describe(item.tensor), trained(item.tensor))
  end
  compare_program()
  core.compare(who, settings_text(settings))
  core.compare("the parameters of the optimizer", table.concat(lines, "\n"))
end

-- Compares the state that an optimizer of this class loads: tensors by name, and its step count. In
-- an elastic job, only the server's matters, and it loads one when it resumes.
function hooks.load_optim(class, steps, state)
  if is_alone() or core.pipeline() or core.is_elastic() then return end
  local lines = {"steps = " .. steps}
  for _, name in ipairs(sorted(state)) do
    if name ~= "steps" then lines[#lines + 1] = name .. " " .. core.digest(state[name]) end
  end
  core.compare(("the state that %s loads"):format(class), table.concat(lines, "\n"))
end

-- ==== Sets =======================================================================================

local SAMPLE = 64              -- number of pixels to compare

-- A list of up to SAMPLE pixels of float images, evenly spread over the set; empty for u8 images.
local function sample_pixels(set)
  local list = {}
  if not set.images or set.images.dtype == "u8" then return list end
  core.step(core.no_grad, function()
    local count = set.images:count()
    local flat = set.images:reshape{count}
    for i = 1, math.min(SAMPLE, count) do
      local at = 1 + (i - 1) * (count - 1) // math.max(math.min(SAMPLE, count) - 1, 1)
      list[i] = flat:slice(1, at, at):item()
    end
  end)
  return list
end

local digests = setmetatable({}, {__mode = "k"})

-- Returns a set's digests, of its labels and of a sample of its images. Computes them once per set.
local function digests_of(set)
  if not digests[set] then digests[set] = {set.source:digest()} end
  return table.unpack(digests[set])
end

-- Compares a data set across all ranks. Labels and u8 pixels must be equal. Floats may differ by a
-- tolerance of 1e-4, because they may have been computed on different CPUs.
function agree.set(what, set)
  if is_alone() or compared[set] then return end
  local labels, images = digests_of(set)
  local names = set.names and "classes " .. table.concat(set.names, ", ") or "no class names"
  local dtype = set.images and set.images.dtype or "u8"
  local crop = set.center_crop and ("\ncenter_crop = %g"):format(set.center_crop) or ""
  core.compare(what, ("%d images\n%dx%dx%d (height, width, channels) %s\n%d classes\n%s\n"
                      .. "labels with digest %08x\na sample of images with digest %08x"):format(
                        #set, set.height, set.width, set.channels, dtype, set.classes, names,
                        labels, images) .. crop)
  core.compare_numbers(what .. ", its mean", set.mean, 1e-4)
  core.compare_numbers(what .. ", its std", set.std, 1e-4)
  core.compare_numbers(what .. ", a sample of its pixels", sample_pixels(set), 1e-4)
  compared[set] = true
end

-- A 32-bit digest of a set, which goes into the step record of each step that trains with the set.
-- 0 if there is only one rank.
function hooks.digest(set)
  if is_alone() then return 0 end
  local labels, images = digests_of(set)
  return (labels * 31 + images * 17 + #set) & 0xffffffff
end

-- ==== Runs =======================================================================================

-- The settings of a run as text, in the order in which they are compared.
local function run_text(o)
  local lines = {"batch = " .. o.batch, "epochs = " .. o.epochs}
  local function add(name, value) lines[#lines + 1] = name .. " = " .. text_of(value) end
  for _, name in ipairs(sorted(o.augment)) do add("augment." .. name, o.augment[name]) end
  add("mixup", o.mixup)
  for i, phase in ipairs(o.phases) do
    for _, name in ipairs{"last", "size", "batch", "area"} do
      add(("sizes[%d].%s"):format(i, name), phase[name])
    end
  end
  add("max_steps", o.max_steps)
  add("check_sync", o.check_sync)
  return table.concat(lines, "\n")
end

-- Compares the settings of a run. Called before it looks for a checkpoint, since with different
-- settings the search could fail on one rank only.
function agree.settings(run)
  if is_alone() then return end
  local o = run.settings
  compare_program()
  core.compare("lt.run", run_text(o))
  agree.set("the training set", o.train)
end

-- tostring(net), without the folders in the paths of functions and the blanks that align columns.
local function tree_text(net)
  return (tostring(net):gsub("function [^\n]*/", "function "):gsub("(%S)  +", "%1 "))
end

local function frozen_text(net)
  local lines = {}
  for name, tensor in net:named_parameters() do lines[#lines + 1] = name .. trained(tensor) end
  return table.concat(lines, "\n")
end

local due = false              -- whether to compare the gradients of the next step

local function is_due(o, step) return o.check_sync ~= nil and step % o.check_sync == 0 end

-- Called before the first step of a run: compares its position, optimizer, net and precision.
function agree.start(run)
  local o = run.settings
  if is_alone() then return end
  due = is_due(o, run.steps + 1)
  local is_elastic = core.is_elastic()   -- a worker gets its position and weights from the server
  if not is_elastic then
    core.compare("the position of the run", ("step %d, epoch %d, %d images of it")
                                         :format(run.steps, run.epoch, run.done))
  end
  core.compare("the optimizer of lt.run", settings_text(optims.settings(o.optims)))
  core.compare("the net", tree_text(o.net))
  core.compare("the parameters of the net", frozen_text(o.net))
  if not is_elastic then core.compare("the weights and buffers", o.net:sha256()) end
  core.compare("the precision", o.trial and "auto" or o.scaler and "fp16 with a loss scale"
                                  or o.amp or "off")
  if o.scaler then o.scaler:compare() end
end

-- Called at the end of each epoch: compares the weights and buffers. A script may have written
-- values to them that depend on this rank's part of the batches. `bench dist` trains the ranks
-- apart in some steps.
function agree.epoch(run)
  local text = not is_alone() and not run.observer and run.mode:weights_text()
  if not text then return end
  core.compare(("the weights and buffers at the end of epoch %d"):format(run.epoch), text)
end

-- ==== With --check-sync ==========================================================================

-- Called before a step of an optimizer: compares the gradients if due, once they are summed over
-- all ranks.
function hooks.begin_step(inner)
  if not due or not core.complete(inner.handle) then return end
  local lines = {}
  for i, item in ipairs(inner.parameters) do
    local grad = item.tensor.grad
    lines[i] = item.name .. " " .. (grad and core.digest(grad) or "none")
  end
  core.compare(("the gradients for step %d"):format(core.steps() + 1), table.concat(lines, "\n"))
end

-- Called after a step of a run: compares the weights if due.
function agree.step(o, step)
  if is_alone() then return end
  if is_due(o, step) then
    core.compare_step()        -- first, since its error can name a setting that differs
    core.compare(("the weights after step %d"):format(step), o.net:sha256())
  end
  due = is_due(o, step + 1)
end

return agree
