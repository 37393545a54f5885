-- run_folder.lua - the folder of a run: finds or makes it, locks it, and detects its loss.
--
-- The lock is on the file OUT/.lock, not on its name: after `rm -rf OUT`, another run can make and
-- lock a new OUT. The run therefore checks after each step, and before and after it writes a file,
-- that the path still leads to the file that it locked.

local core = ...
local checkpoint = require "luatrain.train.checkpoint"
local command_line = require "luatrain.command_line"
local json_text = require "luatrain.json".text
local log = require "luatrain.train.log"
local ranks = require "luatrain.train.ranks"

local folder = {}

local runs, first_folder = 0, nil   -- number of runs of this script; the folder of the first

-- The number of runs that the script has begun.
function folder.runs() return runs end

-- The folder of run `number` of a script whose first run is in `first`.
function folder.of(first, number)
  return number == 1 and first or ("%s-%d"):format(first, number)
end

local function process_id()
  local file <close> = io.open("/proc/self/stat", "rb")
  return file and file:read "n"
end

-- The script named in the first event of a metrics.jsonl, as JSON text; false if the first line is
-- not an event; nil if there is no complete line.
local function writer_of(path)
  for line in log.lines(path) do
    if line:sub(-1) == "\n" and line ~= "\n" then
      return line:find '^{"event":"' and (line:match '"script":(".-"),"folder":' or "") or false
    end
  end
end

-- Raises EENV if a folder has files that the run would overwrite, and another script's run or
-- another program has written them. A folder with checkpoints but no metrics.jsonl belongs to a
-- run.
local function check_owner(name, resume)
  local metrics = name .. "/metrics.jsonl"
  local ok, writer
  if core.exists(metrics) then
    ok, writer = pcall(writer_of, metrics)
    if not ok then core.fail("EENV", writer) end
  elseif checkpoint.newest_step(name) == 0 then
    for _, file in ipairs{"weights.safetensors", "curves.svg"} do
      if core.exists(name .. "/" .. file) then writer = false end
    end
  end
  local own = json_text(command_line.script())
  local other = writer ~= "" and resume ~= "never" and writer ~= own and writer
  if writer == false then
    core.fail("EENV", ("%s has files that no run of luatrain wrote, and this run would overwrite "
                       .. "them; name another folder with --out"):format(name))
  elseif other then
    core.fail("EENV", ("%s has a run of the script %s, but this script is %s; name another folder "
                       .. "with --out (--resume CHECKPOINT continues that run there), or replace "
                       .. "the run with --resume never")
                      :format(name, other, own))
  end
end

-- Finds or makes the run's folder and locks it. If a script makes several runs and sets no `out`,
-- the first uses the folder of --out, and the others use OUT-2, OUT-3, ... beside it.
local function lock_folder(run)
  local o, out = run.settings, run.settings.out
  if o.out_is_the_scripts then
    run.folder = checkpoint.folder(out, o.resume)
  else
    if first_folder then out = folder.of(first_folder, runs) end
    local name, before = checkpoint.folder(out, o.resume, command_line.script())
    run.folder, run.unfinished = name, before or false
    first_folder = first_folder or run.folder
    run.out = first_folder
  end
  local lock, process = core.lock(run.folder .. "/.lock")
  if not lock and process == process_id() then
    core.fail("EINVAL", ("lt.run: this script has a run in %s that is not closed: write local run "
                         .. "<close> = lt.run{...}"):format(run.folder))
  elseif not lock then
    core.fail("EENV", ("%s: process %s has a run in this folder; wait for it or stop it, or name "
                       .. "another folder with --out"):format(run.folder, process or "unknown"))
  end
  run.lock = lock
  checkpoint.clean(run.folder)
  local ok, why = pcall(check_owner, run.folder, o.resume)
  if ok then return end
  lock:close()
  error(why, 0)
end

-- Tells luatrain launch --restarts which folder the run has, the --out with which it resumes, and
-- from where it resumes until it has saved a checkpoint: see tools/relay.h and tools/outcome.c.
-- Called once --resume is applied: from then on, the run resumes from its own checkpoints.
function folder.send_note(run)
  if not run.root or core.on_run or not command_line.variable "LUATRAIN_RESTARTED" then return end
  local resume = run.settings.resume
  io.stderr:write(("\30run %s\n\30out %s\n\30from %s\n"):format(
    run.folder, run.out or "", checkpoint.is_path(resume) and resume or ""))
end

-- Gives run its folder. Only rank 0 locks it and writes to it, except for rank-N.log.
function folder.take(run)
  runs = runs + 1
  if run.root then lock_folder(run) end
  run.folder = core.broadcast_text("the run's folder", run.folder)
  ranks.print_into(run.folder)
end

-- A message that says how a run's folder was lost, or nil if the run still has it.
local function loss_of(run)
  if not run.lock then return nil end      -- only rank 0 writes
  local state, process = run.lock:look()
  if state == "held" then return nil end
  if state == "gone" then
    return "the folder was removed or renamed while the run used it, or its .lock was"
  end
  local other = process and process ~= process_id()
                and (", and process %d has begun a run there"):format(process) or ""
  return "the folder was replaced while the run used it" .. other
end

local function check_loss(run, loss)
  if not loss then return end
  core.fail("EENV", ("%s: %s. The run stops after step %d and writes nothing more there; give each "
                     .. "run a folder of its own with --out, and leave it in place until the run "
                     .. "ends"):format(run.folder, loss, run.steps))
end

-- Raises an error if a run has lost its folder.
function folder.check(run) check_loss(run, loss_of(run)) end

-- Calls write(...), which writes the file `path` in run's folder. Returns the results of pcall.
-- Raises an error if the folder is lost; if that happened during the call, removes the new file
-- from the folder that is now in its place.
function folder.write(run, path, write, ...)
  folder.check(run)
  local ok, err = pcall(write, ...)
  local loss = loss_of(run)
  if ok and loss then os.remove(path) end
  check_loss(run, loss)
  return ok, err
end

return folder
