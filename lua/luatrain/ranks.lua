-- ranks.lua - a run on several ranks: rank 0 speaks and writes for all; what the others print goes
-- to rank-N.log in the run's folder.

local core = ...
local command = require "luatrain.command"
local exits = require "luatrain.exits"
local log = require "luatrain.log"
local sum = require "luatrain.sum"

local ranks = {}

-- ==== What the others print ======================================================================

local kept                     -- what was printed before there is a folder

local function print_to_file(...) io.write(log.line(...)) end

-- lt_lua_join() calls this.
function ranks.begin()
  exits.begin_rank()
  if core.rank() == 0 then return end
  kept = io.tmpfile()
  io.output(kept or "/dev/null")
  print = print_to_file
end

-- The run has a folder: from now on what this rank prints goes there.
function ranks.print_into(folder)
  if not kept then return end
  local file = core.open_plain(("%s/rank-%d.log"):format(folder, core.rank()), "a")
  if not file then return end              -- the folder is on another machine's disk
  file:setvbuf "line"
  kept:seek "set"
  file:write(kept:read "a")
  kept:close()
  kept = nil
  io.output(file)
end

-- ==== Together ===================================================================================

-- lt.on_root(fn, ...): what fn returns, on rank 0; others pass it by. What all ranks do together,
-- as a step or an evaluation, is an error in it.
function ranks.on_root(fn, ...)
  if core.rank() > 0 then return end
  local before = core.on_root(true)
  local _ <close> = setmetatable({}, {__close = function() core.on_root(before) end})
  return fn(...)
end

-- The numbers of all ranks, each of which has as many, one rank behind the other.
function ranks.gather(what, list)
  local rank, size = core.rank()
  local all = {}
  for i = 1, size * #list do all[i] = 0.0 end
  table.move(list, 1, #list, rank * #list + 1, all)
  return {core.sum(what, table.unpack(all))}
end

-- Bytes that this rank has sent to others, or that they have read from it, so far.
function ranks.sent()
  local _, _, bytes = core.reduced()
  return bytes
end

-- The sum over all shards of a batch, in their order, of a number that each has; list has those of
-- this rank's.
function ranks.sum_shards(what, list) return sum(ranks.gather(what, list)) end

local function read_script()
  local file = type(arg) == "table" and type(arg[0]) == "string" and io.open(arg[0], "rb")
  if not file then return "" end
  local text = file:read "a"
  file:close()
  return text
end

local compared = false

-- Before the first parameters are trained: the ranks run the same.
local function compare_programs()
  if compared then return end
  compared = true
  core.compare("their luatrain", core.version)
  core.compare("their seed", tostring(core.seed()))
  core.compare("their script " .. command.script(), read_script())
end

-- Before the first step of a run: the ranks stand at the same place of it, with the same weights.
function ranks.compare_runs(run)
  local _, size = core.rank()
  if size == 1 then return end
  core.compare("where the run stands", ("step %d, epoch %d, %d images of it")
                                       :format(run.steps, run.epoch, run.done))
  core.compare("the weights and buffers", run.settings.net:sha256())
  core.compare("their precision", run.settings.scaler and "fp16 with a loss scale"
                                  or run.settings.amp or "off")
  if run.settings.scaler then run.settings.scaler:compare() end
end

-- After a step: they still have the same weights, where that is asked for.
function ranks.check_sync(o, step)
  if o.check_sync and step % o.check_sync == 0 then
    core.compare(("the weights after step %d"):format(step), o.net:sha256())
  end
end

-- For tests: a sentence about a fault of this rank that was armed and did not come; or nil.
function ranks.missed_fault()
  local name, of, step, struck = core.fault()
  if not name or struck or of ~= core.rank() then return nil end
  return ("the fault of step %d did not come: no gradient of %s was computed in it")
         :format(step, name)
end

-- Makes the gradients of parameters, {name = , tensor = } each, one with those of other shards.
function ranks.reduce(parameters)
  if core.is_alone() then return end
  local lines, tensors = {}, {}
  for i, item in ipairs(parameters) do
    lines[i] = item.name .. " " .. core.describe(item.tensor)
    tensors[i] = item.tensor
  end
  compare_programs()
  core.compare("the parameters to be trained", table.concat(lines, "\n"))
  core.reduce(tensors)
end

return ranks
