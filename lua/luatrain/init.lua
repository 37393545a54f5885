-- init.lua - the table that require "luatrain" returns: all ops, the functions that create tensors,
-- nn, optim, data, and the functions that train, evaluate and save a net.

local core = ...
local arity = require "luatrain.arity"
local check = require "luatrain.check"
local exits = require "luatrain.train.exits"
require "luatrain.train.async_loop"    -- for hooks.lua
local sorted = require "luatrain.keys"
local is_module = require "luatrain.api.module".is_module

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- lt.seed(n): sets the seed to n and restarts all random numbers. --seed has precedence over n.
-- Returns the seed. Without n, it only returns the seed. During a run it is an error, because the
-- run would resume with other random numbers.
local function seed(n)
  if n ~= nil and exits.has_open_run() then
    fail("lt.seed: a run has begun, and would resume with other random numbers; call it before "
         .. "lt.run")
  end
  return core.seed(n)
end

local lt = {
  seed = seed,
  nn = require "luatrain.api.nn",
  optim = require "luatrain.api.optim",
  schedule = require "luatrain.api.schedule",
  metrics = require "luatrain.api.metrics",
  models = require "luatrain.api.models",
  check = require "luatrain.check",   -- lt.check "net{; classes=10}": checks options
  data = require "luatrain.api.data",
  args = arity.of(require "luatrain.api.args", "lt.args", {"defaults"}),
  run = require "luatrain.train.run",
  fit = require "luatrain.train.fit".fit,
  micro_batches = require "luatrain.train.fit".micro_batches,
  mixup = require "luatrain.api.mixup",   -- lt.mixup(x, y, alpha): mixes pairs of images
  -- lt.summary(net, {n, h, w, c}): a table of the net's layers
  summary = require "luatrain.commands.summary",
  -- lt.rank(): this rank, from 0, and the number of ranks
  rank = function() return core.job_rank() end,
  on_root = require "luatrain.train.ranks".on_root,
  barrier = require "luatrain.train.ranks".barrier,
  grad_check = require "luatrain.api.grad_check",
  version = core.version,
  amp = require "luatrain.api.amp",
  -- C functions, whose signatures are in lua/bind
  help = core.help, step = core.step, no_grad = core.no_grad, autocast = core.autocast,
  steps = core.steps, memory = core.memory,
}
for name, op in pairs(core.ops) do lt[name] = op end
for name, constructor in pairs(core.constructors) do lt[name] = constructor end

-- Checks the arity of C functions, whose signatures name their parameters. Ops and functions with
-- varargs, such as x:get, check their own arguments.
for path, signature in pairs(core.signatures) do
  local class, name = path:match "^(%w+)[.:](.*)$"
  local functions, of, who, names = lt, arity.of, path, {}
  if class == "Tensor" then
    functions, of, who = core.tensor_methods, arity.of_method, "x:" .. name
  end
  for param in signature:match "%b()":gmatch "([%w_.]+)%??: [^;]+" do names[#names + 1] = param end
  if names[#names] ~= "..." then functions[name] = of(functions[name], who, names) end
end

core.tensor_meta.__tostring = require "luatrain.api.show"

-- The names and tensors that lt.save writes for a net or a table of tensors, in a fixed order.
local function contents(what)
  if is_module(what) then return what:state() end
  if type(what) ~= "table" then fail("lt.save requires a table of tensors or a net") end
  for name, tensor in pairs(what) do
    if type(name) ~= "string" or not core.is_tensor(tensor) then
      fail("lt.save: a table must map names to tensors, but %s is a %s", name, type(tensor))
    end
  end
  local names, tensors = sorted(what), {}
  for i, name in ipairs(names) do tensors[i] = what[name] end
  return names, tensors
end

local text_of = core.in_c_locale(tostring)

local META = {string = true, number = true, boolean = true}

-- lt.save(path, what[, meta]): writes a net or a table of tensors by name as a safetensors file.
-- meta is a table of strings, numbers and booleans by name; lt.load returns them as strings.
function lt.save(path, what, meta)
  local names, tensors = contents(what)
  local list = {}
  if meta ~= nil and type(meta) ~= "table" then fail("lt.save: meta must be a table of strings") end
  for key, value in pairs(meta or {}) do
    if type(key) ~= "string" then
      fail("lt.save: the keys of meta must be strings, but one is a %s: %s", type(key), key)
    elseif not META[type(value)] then
      fail("lt.save: meta.%s must be a string, a number or a boolean, but is a %s", key,
           type(value))
    end
  end
  for _, key in ipairs(sorted(meta or {})) do
    list[#list + 1] = key
    list[#list + 1] = text_of(meta[key])
  end
  core.save(names, tensors, path, list)
end

-- lt.load(path): returns the tensors of a safetensors file by name, and its metadata as a table of
-- strings. EFILE if the file has a digest, as lt.save writes, and does not match it.
function lt.load(path)
  local file <close> = core.open_file(path)
  file:verify()
  local tensors = {}
  for _, name in ipairs(file:names()) do tensors[name] = file:read(name) end
  return tensors, file:meta()
end

return check.strict(lt, "luatrain", "lt.")
