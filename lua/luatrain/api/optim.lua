-- optim.lua - optimizers. They run update ops over the flat arenas; a script may change their
-- settings before any step.
--
--   local sgd = optim.sgd(net, {lr = 0.1, momentum = 0.9, weight_decay = 5e-4})
--   sgd.lr = 0.05                                -- for all groups without an lr of their own
--   sgd.lr_factor = 0.5                          -- multiplies every lr; schedules set it
--   optim.adam({{params = net.body}, {params = net.head, lr = 1e-3}}, {lr = 1e-4})
--
-- The first argument is a module, a list of parameters, or a list of groups. A group is a table
-- with `params`, a module or a list of parameters, and settings that override the optimizer's.
--
-- decay_bias = false exempts parameters of at most one axis from weight decay: biases, and the
-- scales and shifts of norms. The core therefore has two groups for each of the n groups of the
-- script: core group g has the parameters with more axes, and core group n + g the others.
--
-- clip > 0 limits the global L2 norm of all gradients: a longer gradient is scaled down to it
-- (Pascanu et al. 2013). After a step with clip, sgd.grad_norm is the norm before clipping, or 0 if
-- the step was skipped. On an accelerator, reading it blocks until the step is computed.

local core = ...
local check = require "luatrain.check"
local is_module = require "luatrain.api.module".is_module
local deferred = require "luatrain.api.deferred"
local hooks = require "luatrain.hooks"
local sorted = require "luatrain.keys"

local optim = {}
local Optim = require "luatrain.arity".methods("optim:", "luatrain.Optim")
local INNER = {}               -- key of an optimizer's private state, which new() fills

local function fail(...) core.fail("EINVAL", string.format(...)) end

local meta = {
  __name = "luatrain.Optim",
  __index = function(self, key)
    if key == "groups" then return self[INNER].groups end
    if key ~= "grad_norm" then return Optim[key] end
    local squares = self[INNER].squares
    return squares and math.sqrt(deferred.number(squares))
  end,
  __newindex = function(self, key) self[INNER].spec:value(key) end,   -- unknown key: raises
}

-- ==== Parameters and groups ======================================================================

-- Appends {name, tensor, group} to list for each parameter of `what`, a module or a list of
-- parameters. who names the optimizer in errors.
local function add_parameters(list, what, group, prefix, who)
  if is_module(what) then
    for name, tensor in what:named_parameters() do
      list[#list + 1] = {name = prefix .. name, tensor = tensor, group = group}
    end
    return
  end
  if type(what) ~= "table" then
    fail("%s requires a net, a list of parameters or a list of groups", who)
  end
  for key in pairs(what) do
    if math.type(key) ~= "integer" then
      fail("%s: the list of parameters has a key %s; settings go into the next table", who,
           check.shown(key))
    end
  end
  for i, tensor in ipairs(what) do
    if core.role(tensor) ~= "parameter" then
      fail("%s: item %d of the list is not a parameter", who, i)
    end
    if select(2, core.describe(tensor)) == "pending" then
      fail("%s: item %d of the list has no memory yet; give the module instead of its parameters, "
           .. "or call or load the net first", who, i)
    end
    list[#list + 1] = {name = prefix .. i, tensor = tensor, group = group}
  end
end

local common = "clip:amount=0.0, lr_factor:amount=1.0})"
local of_all = {clip = true, lr_factor = true}      -- groups cannot override these

local function group_value(spec, key, value)
  if type(key) ~= "string" then
    fail("%s: the settings of a group must have names, but got %s", spec.name, check.shown(key))
  end
  if of_all[key] then fail("%s: %s cannot be set for a single group", spec.name, key) end
  return spec:value(key, value)
end

-- Makes a group strict: setting an unknown key is an error.
local function strict_group(spec, group)
  return setmetatable(group, {__newindex = function(self, key, value)
    rawset(self, key, group_value(spec, key, value))
  end})
end

-- Returns the list of groups for the script, which cannot change it: only their settings.
local function strict_groups(spec, groups)
  return setmetatable({}, {
    __index = groups, __len = function() return #groups end,
    __pairs = function() return pairs(groups) end,
    __newindex = function(_, key)
      if groups[key] then
        fail("%s: group %s cannot be replaced; set its settings, such as groups[%s].lr", spec.name,
             check.shown(key), check.shown(key))
      end
      fail("%s: there is no group %s; groups cannot be added to an optimizer", spec.name,
           check.shown(key))
    end})
end

-- Returns the list of groups, each with its own settings, and the list of all their parameters.
local function read_groups(what, spec)
  local first = type(what) == "table" and not is_module(what) and what[1]
  local groups, list = {}, {}
  if type(first) ~= "table" or is_module(first) then
    add_parameters(list, what, 1, "", spec.name)
    return strict_groups(spec, {strict_group(spec, {})}), list
  end
  for g, given in ipairs(what) do
    local group = {}
    for key, value in pairs(given) do
      if key ~= "params" then group[key] = group_value(spec, key, value) end
    end
    if not given.params then fail("%s: group %d has no params", spec.name, g) end
    add_parameters(list, given.params, g, g .. ".", spec.name)
    groups[g] = strict_group(spec, group)
  end
  return strict_groups(spec, groups), list
end

-- For tests: arms the injected fault of core.fault(), which sets a gradient to inf, if the list
-- contains its parameter. EUSAGE if its rank does not exist.
local function arm_fault(list)
  local name, of = core.fault()
  local rank, size = core.rank()
  if name and of >= size then
    core.fail("EUSAGE", ("the fault's rank %d is out of range 0 to %d"):format(of, size - 1))
  end
  for _, item in ipairs(list) do
    if item.name == name then core.arm_fault(item.tensor, rank) end
  end
end

-- The current settings by name: "lr" for the optimizer's, "2.lr" for an override of group 2.
local function settings_of(spec, self, groups)
  local list = {}
  for _, name in ipairs(spec.names) do list[name] = self[name] end
  for g, group in ipairs(groups) do
    for key, value in pairs(group) do list[g .. "." .. key] = value end
  end
  return list
end

local function new(spec, what, options, update)
  local self = spec(options)
  local groups, list = read_groups(what, spec)
  if #list == 0 then fail("%s: there are no parameters to optimize", spec.name) end
  local tensors = {}
  for i, item in ipairs(list) do tensors[i] = item.tensor end
  local inner = update(self, groups)
  inner.spec, inner.parameters, inner.steps = spec, list, 0
  inner.handle = core.new_optim(inner.update, tensors)
  hooks.new_optim(inner, what, spec.name, settings_of(spec, self, groups))
  arm_fault(list)
  for _, item in ipairs(list) do
    local is_bias = #item.tensor.shape <= 1
    inner.handle:set_group(item.tensor, item.group + (is_bias and #groups or 0))
  end
  inner.groups, self[INNER] = groups, inner
  return setmetatable(self, meta)
end

-- ==== Optimizers =================================================================================

local sgd = check("optim.sgd(net, {; lr:amount, momentum=0.0, nesterov=false, weight_decay=0.0, "
                  .. "decay_bias=true, " .. common)

-- v = momentum v + g + weight_decay w;  w = w - lr v
-- With nesterov: w = w - lr (g + weight_decay w + momentum v)
function optim.sgd(what, options)
  return new(sgd, what, options, function(self, groups)
    local momentum = self.momentum ~= 0
    if self.nesterov and not momentum then fail("optim.sgd: nesterov requires a momentum") end
    for _, group in ipairs(groups) do momentum = momentum or (group.momentum or 0) ~= 0 end
    if momentum then
      return {update = "momentum_step", keys = {"lr", "momentum", "nesterov", "weight_decay"}}
    end
    return {update = "sgd_step", keys = {"lr", "weight_decay"}, plain = true}
  end)
end

local lars = check("optim.lars(net, {; lr:amount, momentum=0.9, weight_decay=0.0, trust=0.001, "
                   .. "eps=1e-8, "
                   .. "decay_bias=false, " .. common)

-- LARS, for large batches (You, Gitman and Ginsburg 2017, arXiv:1708.03888). Each parameter's step
-- is proportional to the parameter's norm:
--   v = momentum v + q (g + weight_decay w);  w = w - lr v
--   q = trust |w| / (|g| + weight_decay |w| + eps), or 1 for parameters of at most one axis
-- The paper multiplies by lr inside v. Here a new lr takes full effect at once, as with sgd; while
-- lr is constant, both are the same.
function optim.lars(what, options)
  return new(lars, what, options, function()
    return {update = "lars_step", keys = {"lr", "momentum", "weight_decay", "trust", "eps"},
        adapts = true}
  end)
end

local function adam_like(name, weight_decay, decoupled)
  local spec = check(("optim.%s(net, {; lr:amount, beta1=0.9, beta2=0.999, eps=1e-8, "
                      .. "weight_decay=%s, "
                      .. "decay_bias=true, "):format(name, weight_decay) .. common)
  optim[name] = function(what, options)
    return new(spec, what, options, function()
      return {update = "adam_step", keys = {"lr", "beta1", "beta2", "eps", "weight_decay"},
              decoupled = decoupled, counts = true}
    end)
  end
end

adam_like("adam", "0.0", false)    -- Kingma and Ba 2015; adds weight_decay w to the gradient
adam_like("adamw", "0.01", true)   -- Loshchilov and Hutter 2019; decoupled weight decay

-- ==== Methods ====================================================================================

-- The value of a setting for a group: the group's own, or the optimizer's.
local function setting(self, group, key)
  local value = group[key]
  if value == nil then value = self[key] end
  return self[INNER].spec:value(key, value)
end

-- The options of the update op for a group. is_bias selects its parameters of at most one axis.
local function options_of(self, group, is_bias)
  local inner = self[INNER]
  local options = {decoupled = inner.decoupled}
  for _, key in ipairs(inner.keys) do options[key] = setting(self, group, key) end
  options.lr = options.lr * setting(self, {}, "lr_factor")
  if inner.adapts then options.adapt = not is_bias end
  if is_bias and not setting(self, group, "decay_bias") then options.weight_decay = 0 end
  return options
end

-- If the last step was pending, waits for its status and counts it if it was applied. For
-- asynchronous training, too.
local function count_pending(inner)
  if not inner.pending then return end
  inner.pending = false
  if inner.handle:step_status() == "applied" then inner.steps = inner.steps + 1 end
end

-- Warns once that a step used leftover gradients, as in a GAN: see lt_optim_mixed().
local function warn_of_mixed_grads(inner, log)
  inner.warned = true
  for _, item in ipairs(inner.parameters) do
    if inner.handle:mixed(item.tensor) then
      local text = ("%s: this step also uses leftover gradients, such as that of %s, from a "
                    .. "backward pass that another optimizer has already used; call zero_grad() of "
                    .. "this optimizer after the step of the other, unless this is intended")
                   :format(core.where() .. inner.spec.name, item.name)
      if log then return log:warn(text) end
      if core.rank() == 0 or core.pipeline() then
        io.stderr:write("luatrain: warning: ", text, "\n")
      end
    end
  end
end

-- Takes one step for all parameters that have a gradient. Returns the step status: "applied";
-- "skipped", by a loss scale (lt.amp); "accumulating", if more shards of the batch follow
-- (--vranks); or "pending", on an accelerator, which decides asynchronously whether to apply it;
-- scaler.skipped later counts it if it was skipped. Drops the gradients unless accumulating.
function Optim:step()
  local inner, list = self[INNER], {}
  local log = core.on_step and core.on_step(self)        -- log of the run in whose step this is
  count_pending(inner)
  if inner.plain and self.momentum ~= 0 then
    fail("optim.sgd: this optimizer was made without momentum; make a new one to use it")
  end
  for g, group in ipairs(self.groups) do
    list[g] = options_of(self, group, false)
    list[#self.groups + g] = options_of(self, group, true)
  end
  hooks.begin_step(inner)
  local outcome, squares = inner.handle:step(list, setting(self, {}, "clip"))
  if not inner.warned and inner.handle:mixed() then warn_of_mixed_grads(inner, log) end
  if outcome ~= "accumulating" then
    inner.squares = squares and deferred.scalar(squares, "optim.clip")
  end
  inner.pending = outcome == "pending"
  if outcome == "applied" then inner.steps = inner.steps + 1 end
  return outcome
end

-- Whether this optimizer updates a tensor.
function Optim:has(tensor)
  for _, item in ipairs(self[INNER].parameters) do
    if item.tensor == tensor then return true end
  end
  return false
end

-- The name of its constructor: "optim.sgd".
function Optim:class() return self[INNER].spec.name end

function Optim:settings() return settings_of(self[INNER].spec, self, self.groups) end

-- Sets a setting by its name in settings(). Does nothing if its group does not exist. nil removes a
-- group's override.
function Optim:set(name, value)
  if type(name) ~= "string" then
    fail("optim:set requires the name of a setting, but got %s", check.shown(name))
  end
  local g, key = name:match "^(%d+)%.(.*)$"
  local group = g and self.groups[tonumber(g)]
  if group then group[key] = value end
  if not g then self[name] = value end
end

function Optim:zero_grad()
  for _, item in ipairs(self[INNER].parameters) do item.tensor:zero_grad() end
end

-- Returns a flat table of tensors for lt.save: "v.conv1.w" is slot v of parameter conv1.w; "steps"
-- is the number of applied steps. With Adam, "step.conv1.w" is the number of steps with a gradient
-- for conv1.w. The slots are the optimizer's own tensors, not copies.
function Optim:state()
  local inner = self[INNER]
  count_pending(inner)
  local state = {steps = core.constructors.tensor(inner.steps, {dtype = "i64"})}
  for _, item in ipairs(inner.parameters) do
    if inner.counts then state["step." .. item.name] = inner.handle:steps(item.tensor) end
    for k = 1, math.huge do
      local slot, name = inner.handle:slot(k, item.tensor)
      if not slot then break end
      state[name .. "." .. item.name] = slot
    end
  end
  return state
end

-- A count of steps in a state, as an integer.
local function count_in(state, name)
  local given = core.own_item(state[name])
  local steps = math.tointeger(given)
  if not steps or steps < 0 then
    fail("optim: '%s' must be a non-negative integer, but is %.14g", name, given)
  end
  return steps
end

-- Whether a state has counts for each parameter: an older version saved only "steps".
local function has_counts(state)
  for name in pairs(state) do
    if type(name) == "string" and name:find "^step%." then return true end
  end
  return false
end

-- Copies a state of state() into this optimizer. optim:load(lt.load(path)) works: the metadata is
-- ignored. All ranks must call this together, with the same state.
function Optim:load(state, _)
  local mine = self:state()
  if type(state) ~= "table" then
    fail("optim:load requires a table of tensors, but got a %s", type(state))
  end
  local inner, counts = self[INNER], has_counts(state)
  if not counts then
    for _, item in ipairs(inner.parameters) do mine["step." .. item.name] = nil end
  end
  for _, name in ipairs(sorted(mine)) do
    if state[name] == nil then fail("optim: the state has no %s", name) end
    if not core.is_tensor(state[name]) then
      fail("optim: %s must be a tensor, but is %s", name, check.shown(state[name]))
    end
    local has, wants = core.describe(state[name]), core.describe(mine[name])
    if name ~= "steps" and has ~= wants then
      fail("optim: %s is %s, but this optimizer has %s", name, has, wants)
    end
  end
  local steps, own = count_in(state, "steps"), {}
  for i, item in ipairs(inner.counts and inner.parameters or {}) do
    local name = counts and "step." .. item.name or "steps"
    own[i] = core.is_meta(state[name]) and 0 or count_in(state, name)
  end
  for _, name in ipairs(sorted(state)) do
    if not mine[name] then fail("optim: the state has %s, but this optimizer does not", name) end
  end
  hooks.load_optim(self:class(), steps, state)
  local has_slots = false
  for name, tensor in pairs(mine) do
    has_slots = has_slots or not name:find "^steps?%f[%z.]"
    if name ~= "steps" and not core.is_meta(tensor) then tensor:copy(state[name]) end
  end
  for i, count in ipairs(own) do inner.handle:set_steps(inner.parameters[i].tensor, count) end
  inner.steps, inner.pending = steps, false
  inner.has_loaded_slots = has_slots
end

-- For asynchronous training: {handle = of the core, steps = taken so far} of an optimizer.
function core.inner_of(self) return self[INNER] end

core.count_pending = count_pending

return check.strict(optim, "optim")
