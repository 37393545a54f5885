-- checkpoint.lua - saves the state of a run to a file, and finds the file that a run resumes from.
--
-- FOLDER/step-00000120.safetensors has the tensors of the net (net.*), of its optimizers (optim.*,
-- optim2.*, ...), of asynchronous training (async.*) and of delayed sums (delayed.*), and as
-- metadata all other state that the next step depends on. Numbers are written exactly. A digest
-- over the whole file detects damage; the run then resumes from the previous checkpoint, which is
-- why two are kept. A run never starts over silently: if there are checkpoints and none is usable,
-- that is an error.

local core = ...
local optims = require "luatrain.train.optims"
local read_file = require "luatrain.api.module".read_file
local sorted = require "luatrain.keys"

local checkpoint = {}

local FORMAT = 2
local KEPT = 2

local function fail(...) core.fail("EFILE", string.format(...)) end

-- An error message without its script line, for use inside another message.
function checkpoint.reason(err) return (tostring(err):gsub("^[^:\n]*:%d+: ", "")) end

-- ==== The files of a folder ======================================================================

-- The path of the checkpoint that a run writes after a step.
function checkpoint.path(folder, step)
  return ("%s/step-%08d.safetensors"):format(folder, step)
end

-- The files in a folder that are named like checkpoints: a list of {path, digits = the step in the
-- name}.
local function named(folder)
  local found = {}
  for _, name in ipairs(core.list_folder(folder) or {}) do
    local digits = name:match "^step%-(%d+)%.safetensors$"
    if digits then found[#found + 1] = {path = folder .. "/" .. name, digits = digits} end
  end
  return found
end

-- The folder of the checkpoint from which a run resumes: `from` is the checkpoint or its folder.
-- nil if there is no checkpoint.
function checkpoint.folder_of(from)
  if core.list_folder(from) then return named(from)[1] and from or nil end
  return core.exists(from) and (from:match "^(.+)/[^/]*$" or from:match "^/" or ".") or nil
end

-- Whether the setting `resume` of a run is a checkpoint or a folder, not "auto", "never" or false.
function checkpoint.is_path(resume)
  return resume and resume ~= "auto" and resume ~= "never"
end

-- Removes the temporary files of a killed process. No other process writes: the folder is locked.
function checkpoint.clean(folder)
  for _, name in ipairs(core.list_folder(folder) or {}) do
    local of = name:match "^(.*)%.tmp%d+$"
    if of and (of:find "^step%-%d+%.safetensors$" or of == "weights.safetensors"
               or of == "curves.svg") then
      os.remove(folder .. "/" .. name)
    end
  end
end

-- Removes all files that a run has written to a folder, for --resume never.
function checkpoint.remove(folder)
  local paths = {}
  for i, entry in ipairs(named(folder)) do paths[i] = entry.path end
  for _, name in ipairs{"metrics.jsonl", "weights.safetensors", "curves.svg"} do
    paths[#paths + 1] = folder .. "/" .. name
  end
  for _, path in ipairs(paths) do
    local done, why = os.remove(path)
    if not done and core.exists(path) ~= false then
      fail("--resume never: cannot remove %s", why)
    end
  end
end

-- Adds the path of a new checkpoint to `own`, the paths of the checkpoints that belong to a run,
-- the oldest first. Removes all but the last KEPT of them. Never touches other files in the folder.
function checkpoint.prune(own, path)
  for i = #own, 1, -1 do
    if own[i] == path then table.remove(own, i) end
  end
  own[#own + 1] = path
  while #own > KEPT do os.remove(table.remove(own, 1)) end
end

-- ==== Writing ====================================================================================

-- A number, boolean or string as text. A float is written exactly, in hexadecimal.
local text_of = core.in_c_locale(function(value)
  return math.type(value) == "float" and ("%a"):format(value) or tostring(value)
end)

-- The names, without prefix, and tensors of the sums of gradients that the next step applies.
local function delayed(mode)
  local names, sums, counts = mode:delayed()
  local all, tensors = {}, {}
  for i, name in ipairs(names) do
    all[2 * i - 1], tensors[2 * i - 1] = "sum." .. name, sums[i]
    all[2 * i], tensors[2 * i] = "count." .. name, counts[i]
  end
  return all, tensors, counts
end

-- The names and tensors of net, optimizers and delayed sums in a checkpoint.
local function contents(net, list, mode)
  local names, tensors = {}, {}
  local net_names, net_tensors = net:state()
  for i, name in ipairs(net_names) do
    names[i], tensors[i] = "net." .. name, net_tensors[i]
  end
  for i, optim in ipairs(list) do
    local slots = optim:state()
    for _, name in ipairs(sorted(slots)) do
      names[#names + 1], tensors[#tensors + 1] = optims.prefix(i) .. name, slots[name]
    end
  end
  local delayed_names, delayed_tensors = delayed(mode)
  for i, name in ipairs(delayed_names) do
    names[#names + 1], tensors[#tensors + 1] = "delayed." .. name, delayed_tensors[i]
  end
  return names, tensors
end

-- Sends the tensors of this stage of a pipeline to rank 0, which calls checkpoint.save().
function checkpoint.send(net, list, mode) core.save(contents(net, list, mode)) end

-- Writes a checkpoint of net, optimizers and state. state is a flat table of numbers and booleans,
-- except for strings: state.optim, the classes of the optimizers, and state["held.1"], ..., the
-- names of their parameters. mode: of the run; it may add tensors async.*.
function checkpoint.save(path, net, list, state, mode)
  local meta = {"format", tostring(FORMAT)}
  local names, tensors = contents(net, list, mode)
  mode:add_state(names, tensors)
  for _, key in ipairs(sorted(state)) do
    local value = state[key]
    meta[#meta + 1] = key
    meta[#meta + 1] = text_of(value)
  end
  core.save(names, tensors, path, meta)
end

-- ==== Reading ====================================================================================

local WORDS = {["true"] = true, ["false"] = false, inf = math.huge, ["-inf"] = -math.huge,
               nan = core.nan, ["-nan"] = core.nan}

-- The number or boolean that save() wrote as text; nil for any other text.
local value_of = core.in_c_locale(function(text)
  if WORDS[text] ~= nil then return WORDS[text] end
  return tonumber(text)
end)

-- Reads the state from the header of an open file, unverified. EFILE if it is not a checkpoint.
local function read_state(file, path)
  if not file:has_digest() then
    fail("%s has no digest: it is not a checkpoint of luatrain, or is damaged", path)
  end
  local state, meta = {}, file:meta()
  for key, text in pairs(meta) do
    state[key] = key:find "^held%." and text or value_of(text)
  end
  state.optim = (meta.optim or ""):match "^optim%.[%w., ]+$"
  if not state.format then fail("%s is not a checkpoint of a run", path) end
  if state.format ~= FORMAT then
    fail("%s has format %d, but this luatrain reads format %d", path, state.format, FORMAT)
  end
  return state
end

-- Opens a checkpoint and verifies its digest. Returns the file and its state.
local function open(path)
  local file = core.open_file(path)
  file:verify()
  return file, read_state(file, path)
end

-- The step of a checkpoint. Reads only the header.
local function step_in(path)
  local file <close> = core.open_file(path)
  local step = read_state(file, path).step
  if math.type(step) ~= "integer" then fail("%s is not a checkpoint of a run", path) end
  return step
end

-- A warning if the step in a checkpoint's name differs from the step in its metadata; else nil.
local function misnamed(path, step)
  local digits = path:match "step%-0*(%d+)%.safetensors$"
  return digits and tonumber(digits) ~= step
         and ("%s: the name says step %s, but the file has step %d, which is used"):format(
           path, digits, step)
         or nil
end

-- The checkpoints of a folder, the newest first: {path, step, is_own, is_read}. The step is the one
-- in the metadata, since a file may be copied or renamed. is_own: the file has the name that a
-- run gives to this step. is_read: its header can be read; otherwise step is from the name.
-- Reads headers only: a folder may have many checkpoints.
local function list(folder)
  local found = named(folder)
  for _, entry in ipairs(found) do
    local ok, step = pcall(step_in, entry.path)
    entry.is_read, entry.step = ok, ok and step or tonumber(entry.digits)
    entry.is_own = ok and entry.path == checkpoint.path(folder, step)
  end
  table.sort(found, function(a, b)
    if a.step ~= b.step then return a.step > b.step end
    if a.is_own ~= b.is_own then return a.is_own end
    return a.path < b.path
  end)
  return found
end

-- The step of the newest checkpoint in a folder whose header can be read; 0 if there is none.
function checkpoint.newest_step(folder)
  for _, entry in ipairs(list(folder)) do
    if entry.is_read then return entry.step end
  end
  return 0
end

-- The step of a checkpoint, or of the newest one in a folder; 0 if it cannot be read.
function checkpoint.step_of(from)
  if core.list_folder(from) then return checkpoint.newest_step(from) end
  local ok, step = pcall(step_in, from)
  return ok and step or 0
end

-- The list for checkpoint.prune(), for a run that resumes in a folder from a step. Newer
-- checkpoints must be damaged, since the run did not resume from them; prune() removes them first.
function checkpoint.own(folder, step)
  local own, newer, entries = {}, {}, list(folder)
  for i = #entries, 1, -1 do
    local entry = entries[i]
    if entry.is_own then table.insert(entry.step > step and newer or own, entry.path) end
  end
  return table.move(own, 1, #own, #newer + 1, newer)
end

local function verify(path)
  local _ <close> = open(path)
end

-- Finds the newest readable checkpoint in a folder. Returns its file, state and path, all nil if
-- the folder has no checkpoint, and a list of problems with other checkpoints and with names.
local function newest(folder)
  local entries, wrong = list(folder), {}
  for _, entry in ipairs(entries) do
    local text = entry.is_read and misnamed(entry.path, entry.step)
    if text then                     -- misnamed, or its step is damaged: verify finds out
      local ok, why = pcall(verify, entry.path)
      wrong[#wrong + 1] = ok and text or checkpoint.reason(why)
      entry.is_damaged = not ok
    end
  end
  for _, entry in ipairs(entries) do
    if not entry.is_damaged then
      local ok, file, state = pcall(open, entry.path)
      if ok then return file, state, entry.path, wrong end
      wrong[#wrong + 1] = checkpoint.reason(file)
    end
  end
  if #entries > 0 then
    fail("%s: no checkpoint can be read, and --resume never starts over:\n  %s", folder,
         table.concat(wrong, "\n  "))
  end
  return nil, nil, nil, wrong
end

-- Reads the tensors of a checkpoint into net and optimizers, and its delayed sums, if it has any.
-- An older version saved "optim.steps", but not the number of steps of each parameter.
local function restore(file, path, net, list, mode)
  local saved = {}
  for _, name in ipairs(file:names()) do saved[name] = true end
  read_file(file, path, "net.", net:state())
  for i, optim in ipairs(list) do
    local prefix, state, slots = optims.prefix(i), optim:state(), {}
    for name in pairs(state) do
      if name:find "^step%." and not saved[prefix .. name] then state[name] = nil end
    end
    local keys = sorted(state)
    for k, key in ipairs(keys) do slots[k] = state[key] end
    read_file(file, path, prefix, keys, slots, "optimizer")
    optim:load(state)
  end
  local names, tensors, counts = delayed(mode)
  if names[1] and saved["delayed." .. names[1]] then
    read_file(file, path, "delayed.", names, tensors, "run")
    mode:set_delayed(counts)
  end
end

-- Restores net and optimizers from a checkpoint, or from the newest one in a folder. Calls
-- check(state, path) first, which may raise an error to reject it. Returns the state, its path, and
-- a list of problems with names and other files; state and path are nil if a folder has no
-- checkpoint. If the checkpoint has tensors async.*, state.async has them by name, without prefix.
-- state.delay: 1 if it has delayed sums, else 0. mode: of the run.
function checkpoint.load(from, net, list, mode, check)
  local file, state, path, wrong
  if core.list_folder(from) then
    file, state, path, wrong = newest(from)
    if not file then return nil, nil, wrong end
  else
    file, state = open(from)
    path, wrong = from, {}
  end
  local _ <close> = file
  state.delay = 0
  for _, name in ipairs(file:names()) do
    if name:find "^delayed%." then state.delay = 1 end
    local own = name:match "^async%.(.*)$"
    if own then
      state.async = state.async or {}
      state.async[own] = file:read(name)
    end
  end
  check(state, path)
  if path == from then wrong[1] = misnamed(path, state.step) end
  restore(file, path, net, list, mode)
  return state, path, wrong
end

-- ==== The folder of a run ========================================================================

-- The newest folder runs/NAME-N, or nil.
function checkpoint.newest_folder(name)
  local most
  for _, entry in ipairs(core.list_folder "runs" or {}) do
    local head, n = entry:match "^(.*)%-(%d+)$"
    n = head == name and tonumber(n)
    if n and n > (most or 0) then most = n end
  end
  return most and ("runs/%s-%d"):format(name, most)
end

-- Whether the run in a folder stopped before its end and is not running now.
local function is_unfinished(folder)
  if core.exists(folder .. "/weights.safetensors") or not named(folder)[1] then return false end
  local known, lock = pcall(core.lock, folder .. "/.lock")
  if known and lock then lock:close() end
  return known and lock ~= nil
end

-- Returns the folder that a run writes into, and makes it if it is new: out, if given; else the
-- folder that `resume` names; else, with resume = "auto", the newest of this script; else a new
-- runs/NAME-N. In the last case also returns the folder before it, if its run is unfinished.
function checkpoint.folder(out, resume, name)
  if not out and resume and resume ~= "auto" and core.list_folder(resume) then out = resume end
  if out then
    core.make_folder(out)
    return out
  end
  local newest = resume == "auto" and checkpoint.newest_folder(name)
  if newest then return newest end
  core.make_folder "runs"
  local n = 1
  while not core.new_folder(("runs/%s-%d"):format(name, n)) do n = n + 1 end
  local before = ("runs/%s-%d"):format(name, n - 1)
  return ("runs/%s-%d"):format(name, n), is_unfinished(before) and before or nil
end

return checkpoint
