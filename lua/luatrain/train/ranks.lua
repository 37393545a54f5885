-- ranks.lua - a run on several ranks. Rank 0 prints and saves for all; the output of the others
-- goes to rank-N.log in the run's folder.

local core = ...
local agree = require "luatrain.train.agree"
local check = require "luatrain.check"
local exits = require "luatrain.train.exits"
local log = require "luatrain.train.log"
local sources = require "luatrain.train.sources"
local sum = require "luatrain.sum"

local ranks = {}

-- ==== Output of the other ranks ==================================================================

local kept                     -- temporary file with the output before the run has a folder

local function print_to_file(...) io.write(log.line(...)) end

-- Prepares this Lua state to run as a rank. lt_lua_join() calls this.
function ranks.begin()
  exits.begin_rank()
  sources.track()
  if core.rank() > 0 then
    kept = io.tmpfile()
    io.output(kept or "/dev/null")
    print = print_to_file
  end
  require "luatrain.train.share".begin()     -- here, because share.lua requires this file
end

-- Redirects this rank's output to rank-N.log in the run's folder, and moves earlier output there.
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

-- ==== Collective functions =======================================================================

-- lt.on_root(fn, ...): on rank 0, calls fn(...) and returns its results; on other ranks, does
-- nothing. In fn, collective operations such as a step or an evaluation raise an error.
function ranks.on_root(fn, ...)
  if type(fn) ~= "function" and not (getmetatable(fn) or {}).__call then
    core.fail("EINVAL", "lt.on_root requires a function, but got " .. check.shown(fn))
  end
  if core.job_rank() > 0 then return end
  local before = core.on_root(true)
  local _ <close> = setmetatable({}, {__close = function() core.on_root(before) end})
  return fn(...)
end

-- lt.barrier(): waits until all ranks have called it. In asynchronous training, it may only be
-- called before the run and after its end.
function ranks.barrier() core.barrier() end

-- Gathers lists of numbers: returns the lists of all ranks, concatenated in rank order. Each rank's
-- list must have the same length.
function ranks.gather(what, list)
  local rank, size = core.rank()
  local all = {}
  for i = 1, size * #list do all[i] = 0.0 end
  table.move(list, 1, #list, rank * #list + 1, all)
  return {core.sum(what, table.unpack(all))}
end

-- The total bytes that this rank has sent to others, or that they have read from it.
function ranks.sent()
  local _, _, bytes = core.reduced()
  return bytes
end

-- The seconds that this rank has waited for others so far, in optimizer steps and passes.
function ranks.waited()
  local _, _, _, _, seconds = core.reduced()
  return seconds
end

-- The sum of a number over all shards of a batch, in the order of the shards. list has the numbers
-- of this rank's shards.
function ranks.sum_shards(what, list) return sum(ranks.gather(what, list)) end

-- For tests: a message if a fault was armed for this rank but not injected; else nil.
function ranks.missed_fault()
  local name, of, step, injected = core.fault()
  if not name or injected or of ~= core.rank() then return nil end
  return ("the fault of step %d did not occur: no gradient of %s was computed in it")
         :format(step, name)
end

-- Adds the parameters of a new optimizer, a list of {name = , tensor = }, to the gradient exchange,
-- and gives them rank 0's values. who (its constructor) and settings are compared first.
function ranks.reduce(parameters, who, settings)
  if core.is_alone() then return end
  local tensors = {}
  for i, item in ipairs(parameters) do tensors[i] = item.tensor end
  agree.optimizer(who, settings, parameters)
  core.reduce(tensors)
end

return ranks
