-- folder.lua - the folder of a run: which one it is, and that no other run has it.

local core = ...
local checkpoint = require "luatrain.checkpoint"
local command = require "luatrain.command"
local ranks = require "luatrain.ranks"

local runs, first_folder = 0, nil   -- made by this script

local function process_id()
  local file <close> = io.open("/proc/self/stat", "rb")
  return file and file:read "n"
end

-- The folder, locked. A script that makes several runs and does not say where they go has one --out
-- for all: that of the first, and beside it OUT-2, OUT-3, ...
local function lock_folder(run)
  local o, out = run.settings, run.settings.out
  runs = runs + 1
  if o.out_is_the_scripts then
    run.folder = checkpoint.folder(out, o.resume)
  else
    if first_folder then out = ("%s-%d"):format(first_folder, runs) end
    local folder, before = checkpoint.folder(out, o.resume, command.script())
    run.folder, run.unfinished = folder, before or false
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
end

-- Gives run its folder, which is rank 0's to write into.
return function(run)
  if run.root then lock_folder(run) end
  run.folder = core.tell("the run's folder", run.folder)
  ranks.print_into(run.folder)
end
