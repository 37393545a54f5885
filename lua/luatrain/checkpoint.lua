-- checkpoint.lua - the state of a run in a file, and which file a run goes on from.
--
-- FOLDER/step-00000120.safetensors holds the tensors of the net (net.*) and of its optimizer
-- (optim.*), and as metadata everything else that decides what the next step computes. Numbers are
-- written so that they are read back to the last bit. A digest over the whole file tells a damaged
-- one; then the one before is used, which is why two are kept. Nothing here ever starts over by
-- itself: when there are checkpoints and none can be used, that is an error.

local core = ...
local read_file = require "luatrain.module".read_file
local sorted = require "luatrain.keys"

local checkpoint = {}

local FORMAT = 2
local KEPT = 2

local function fail(...) core.fail("EFILE", string.format(...)) end

-- A message without the script's line: to stand inside of another one.
function checkpoint.reason(err) return (tostring(err):gsub("^[^:\n]*:%d+: ", "")) end

-- ==== The files of a folder ======================================================================

-- {step, path} of each, the newest first.
local function list(folder)
  local found = {}
  for _, name in ipairs(core.list_folder(folder) or {}) do
    local step = name:match "^step%-(%d+)%.safetensors$"
    if step then found[#found + 1] = {step = tonumber(step), path = folder .. "/" .. name} end
  end
  table.sort(found, function(a, b) return a.step > b.step end)
  return found
end

-- What a killed process left half written goes. Nobody writes it now: the folder is locked.
function checkpoint.clean(folder)
  for _, name in ipairs(core.list_folder(folder) or {}) do
    local of = name:match "^(.*)%.tmp%d+$"
    if of and (of:find "^step%-%d+%.safetensors$" or of == "weights.safetensors"
               or of == "curves.svg") then
      os.remove(folder .. "/" .. name)
    end
  end
end

-- The step of the folder's last one; 0 when there is none.
function checkpoint.newest_step(folder)
  local newest = list(folder)[1]
  return newest and newest.step or 0
end

-- All that a run has written goes.
function checkpoint.remove(folder)
  for _, entry in ipairs(list(folder)) do os.remove(entry.path) end
  for _, name in ipairs{"metrics.jsonl", "weights.safetensors", "curves.svg"} do
    os.remove(folder .. "/" .. name)
  end
end

-- Those before the last KEPT ones up to a step go. Later ones are damaged, or they would have been
-- used; the run writes over them when it gets there.
local function prune(folder, step)
  local kept = 0
  for _, entry in ipairs(list(folder)) do
    if entry.step <= step then
      kept = kept + 1
      if kept > KEPT then os.remove(entry.path) end
    end
  end
end

-- ==== Writing ====================================================================================

-- Writes net, optimizer and state, a flat table of numbers and booleans, and removes the
-- checkpoints that are no longer needed. Returns the path.
function checkpoint.save(folder, net, optim, state)
  local names, tensors, meta = {}, {}, {"format", tostring(FORMAT)}
  local net_names, net_tensors = net:state()
  for i, name in ipairs(net_names) do
    names[i], tensors[i] = "net." .. name, net_tensors[i]
  end
  local slots = optim:state()
  for _, name in ipairs(sorted(slots)) do
    names[#names + 1], tensors[#tensors + 1] = "optim." .. name, slots[name]
  end
  for _, key in ipairs(sorted(state)) do
    local value = state[key]
    meta[#meta + 1] = key
    meta[#meta + 1] = math.type(value) == "float" and ("%a"):format(value) or tostring(value)
  end
  local path = ("%s/step-%08d.safetensors"):format(folder, state.step)
  core.save(names, tensors, path, meta)
  prune(folder, state.step)
  return path
end

-- ==== Reading ====================================================================================

local WORDS = {["true"] = true, ["false"] = false, inf = math.huge, ["-inf"] = -math.huge,
               nan = 0 / 0, ["-nan"] = 0 / 0}

-- What save() wrote of a number or boolean; nil for another text.
local function value_of(text)
  if WORDS[text] ~= nil then return WORDS[text] end
  return tonumber(text)
end

-- Opens a checkpoint and makes sure that every bit of it is as it was written. Returns the file
-- and its state.
local function open(path)
  local file = core.open_file(path)
  if not file:has_digest() then
    fail("%s: it has no digest: it is no checkpoint of luatrain, or damaged", path)
  end
  file:verify()
  local state = {}
  for key, text in pairs(file:meta()) do state[key] = value_of(text) end
  if not state.format then fail("%s: this is no checkpoint of a run", path) end
  if state.format ~= FORMAT then
    fail("%s: this checkpoint has format %d, this luatrain reads %d", path, state.format, FORMAT)
  end
  return file, state
end

-- The newest checkpoint of a folder that can be read: its file, state and path; nothing when there
-- is none at all. And a list of what is wrong with newer ones.
local function newest(folder)
  local wrong = {}
  for _, entry in ipairs(list(folder)) do
    local ok, file, state = pcall(open, entry.path)
    if ok then return file, state, entry.path, wrong end
    wrong[#wrong + 1] = checkpoint.reason(file)
  end
  if #wrong > 0 then
    fail("%s: no checkpoint can be read, and --resume never starts over:\n  %s", folder,
         table.concat(wrong, "\n  "))
  end
  return nil, nil, nil, wrong
end

-- Reads file over net and optimizer.
local function restore(file, path, net, optim)
  local state, slots = optim:state(), {}
  local keys = sorted(state)
  for i, key in ipairs(keys) do slots[i] = state[key] end
  read_file(file, path, "net.", net:state())
  read_file(file, path, "optim.", keys, slots, "optimizer")
  optim:load(state)
end

-- Restores net and optimizer from a checkpoint, or from the newest of a folder. check(state, path)
-- may refuse it before. Returns the state, its path, and a list of what is wrong with newer files;
-- nil for the first two when a folder has no checkpoint.
function checkpoint.load(from, net, optim, check)
  local file, state, path, wrong
  if core.list_folder(from) then
    file, state, path, wrong = newest(from)
    if not file then return nil, nil, wrong end
  else
    file, state = open(from)
    path, wrong = from, {}
  end
  local _ <close> = file
  check(state, path)
  restore(file, path, net, optim)
  return state, path, wrong
end

-- ==== The folder of a run ========================================================================

-- The number of the newest runs/NAME-N, or nil.
local function newest_run(name)
  local most
  for _, entry in ipairs(core.list_folder "runs" or {}) do
    local head, n = entry:match "^(.*)%-(%d+)$"
    n = head == name and tonumber(n)
    if n and n > (most or 0) then most = n end
  end
  return most
end

-- Whether a run in this folder was stopped before its end, and is not going on just now.
local function is_unfinished(folder)
  if core.exists(folder .. "/weights.safetensors") or not list(folder)[1] then return false end
  local known, lock = pcall(core.lock, folder .. "/.lock")
  if known and lock then lock:close() end
  return known and lock ~= nil
end

-- The folder that a run writes into, made if it is new: out if that is given; the folder that
-- `resume` names; with resume = "auto" the script's newest; else a new one of its own. For a new
-- one: the folder before it too, if the run there is not finished.
function checkpoint.folder(out, resume, name)
  if not out and resume and resume ~= "auto" and core.list_folder(resume) then out = resume end
  if out then
    core.make_folder(out)
    return out
  end
  local n = resume == "auto" and newest_run(name)
  if n then return ("runs/%s-%d"):format(name, n) end
  core.make_folder "runs"
  n = 1
  while not core.new_folder(("runs/%s-%d"):format(name, n)) do n = n + 1 end
  local before = ("runs/%s-%d"):format(name, n - 1)
  return ("runs/%s-%d"):format(name, n), is_unfinished(before) and before or nil
end

return checkpoint
