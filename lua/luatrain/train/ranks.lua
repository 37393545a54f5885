-- ranks.lua - a run on several ranks: rank 0 speaks and writes for all; what the others print goes
-- to rank-N.log in the run's folder.

local core = ...
local agree = require "luatrain.train.agree"
local exits = require "luatrain.train.exits"
local log = require "luatrain.train.log"
local sources = require "luatrain.train.sources"
local sum = require "luatrain.sum"

local ranks = {}

-- ==== What the others print ======================================================================

local kept                     -- what was printed before there is a folder

local function print_to_file(...) io.write(log.line(...)) end

-- lt_lua_join() calls this.
function ranks.begin()
  exits.begin_rank()
  sources.track()
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

-- For tests: a sentence about a fault of this rank that was armed and did not come; or nil.
function ranks.missed_fault()
  local name, of, step, injected = core.fault()
  if not name or injected or of ~= core.rank() then return nil end
  return ("the fault of step %d did not come: no gradient of %s was computed in it")
         :format(step, name)
end

-- Starts the allreduce of gradients for parameters, each {name = , tensor = }, of an optimizer that
-- `who` makes with these settings.
function ranks.reduce(parameters, who, settings)
  if core.is_alone() then return end
  local tensors = {}
  for i, item in ipairs(parameters) do tensors[i] = item.tensor end
  agree.optimizer(who, settings, parameters)
  core.reduce(tensors)
end

return ranks
