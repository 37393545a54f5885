-- nn.lua - modules: what has parameters or modes. All else is a function: lt.relu(x), x + y.
--
-- A module is a plain table. Its fields are its parts (parameters, buffers, other modules, and lists of these) and its
-- settings. It is called like a function. Parts have an order, that of their making (of their numbers in a list), and a
-- name in the tree: net[4].w is "4.w", net.block1.conv.w is "block1.conv.w".
--
-- Parameters are made without memory. A whole tree gets it in one piece when it is first called, listed, loaded, saved or
-- given to an optimizer, whichever part of it that happens to. So a module knows the one that it is a part of.
--
-- Behind a module is a record, under a key that is no string: [1] its path "net.4" and [2] the function that calls it, by
-- which the binding finds it on the stack (bind.c); forward; text, for tostring; parent; placed; order, of layers that
-- have names.

local core = require "luatrain.core"
local check = require "luatrain.check"
local ops = core.ops
local KEY = core.module_key

local nn = {}
local Module = {}              -- the methods of all modules
local meta = {__index = Module, __name = "luatrain.Module"}
local births = setmetatable({}, {__mode = "k"})   -- of modules and parameters: when each was made
local n_births = 0

local function fail(...) core.fail("EINVAL", string.format(...)) end
local function is_module(value) return type(value) == "table" and rawget(value, KEY) ~= nil end
local function is_list(value) return type(value) == "table" and getmetatable(value) == nil end

local function born(value)
  n_births = n_births + 1
  births[value] = n_births
  return value
end

-- ==== The tree ====================================================================================

-- When a value was made, if it is a part or a list with parts in it; else nil.
local function birth_of(value)
  if births[value] or not is_list(value) then return births[value] end
  local first
  for _, item in pairs(value) do
    local birth = births[item]
    if birth and (not first or birth < first) then first = birth end
  end
  return first
end

local function by_order(a, b)
  local a_number, b_number = math.type(a.key) ~= nil, math.type(b.key) ~= nil
  if a_number ~= b_number then return a_number end
  if a_number then return a.key < b.key end
  if a.birth ~= b.birth then return a.birth < b.birth end
  return a.name < b.name
end

-- The parts of a module or list in order: {key, name, value, birth} each. Functions are parts for tostring alone.
local function parts(node, functions)
  local list = {}
  for key, value in pairs(node) do
    local birth = key ~= KEY and (birth_of(value) or functions and type(value) == "function" and math.huge)
    if birth then list[#list + 1] = {key = key, name = tostring(key), value = value, birth = birth} end
  end
  table.sort(list, by_order)
  return list
end

-- Appends all modules and tensors below a node to list: {name, value, owner} each, a module before what is in it.
local function flatten(node, prefix, owner, list, above)
  if above[node] then fail("nn: %s contains itself", node[KEY].text) end
  above[node] = true
  local found = parts(node)
  local order = is_module(node) and node[KEY].order
  if order and #order ~= #found then fail("%s: its layers are those that it was made with", node[KEY].text) end
  for _, part in ipairs(found) do
    local name, value = prefix .. part.name, part.value
    if not is_list(value) then list[#list + 1] = {name = name, value = value, owner = owner} end
    if type(value) == "table" then flatten(value, name .. ".", is_module(value) and value or owner, list, above) end
  end
  above[node] = nil
  return list
end

local function tree(module) return flatten(module, "", module, {}, {}) end

-- Names and tensors of a tree in order. A tensor that is in several places comes several times.
local function tensors_of(list)
  local names, tensors = {}, {}
  for _, entry in ipairs(list) do
    if not is_module(entry.value) then
      names[#names + 1], tensors[#tensors + 1] = entry.name, entry.value
    end
  end
  return names, tensors
end

-- Gives memory to the whole tree that a module is a part of.
local function place(module)
  local root = module
  while root[KEY].parent do root = root[KEY].parent end
  local list = tree(root)
  core.place(tensors_of(list))
  local path = type(rawget(root, "name")) == "string" and root.name or "net"
  root[KEY][1], root[KEY].placed = path, true
  for i = #list, 1, -1 do      -- backwards, so that the first of several names stays
    local entry = list[i]
    if is_module(entry.value) then
      local record = entry.value[KEY]
      record[1], record.parent, record.placed = path .. "." .. entry.name, entry.owner, true
    end
  end
end

-- Names and tensors below a module, all with memory.
local function placed_tensors(module)
  local names, tensors = tensors_of(tree(module))
  for _, tensor in ipairs(tensors) do
    local _, state = core.describe(tensor)
    if state == "pending" then
      place(module)
      break
    end
  end
  return names, tensors
end

-- Of names and tensors: each tensor once, under its first name, if it has the role "parameter" or "buffer" (nil: both).
local function once(names, tensors, role)
  local seen, some_names, some_tensors = {}, {}, {}
  for i, tensor in ipairs(tensors) do
    if not seen[tensor] and (not role or core.role(tensor) == role) then
      some_names[#some_names + 1], some_tensors[#some_tensors + 1] = names[i], tensor
    end
    seen[tensor] = true
  end
  return some_names, some_tensors
end

local function collect(module, role)
  local names, tensors = placed_tensors(module)
  return once(names, tensors, role)
end

-- ==== Calling =====================================================================================

local function place_for_call(module, record)
  local parent = record.parent
  record.parent = parent or core.active_module(module)
  place(module)
  if not record.placed then
    record.parent = parent
    fail("%s is called but is not among the fields of its caller, so nothing would train or save it", record.text)
  end
end

local function all(...) return ... end

-- Not a tail call: the frame of this function tells that the module runs.
function meta.__call(self, ...)
  local record = self[KEY]
  if not record.placed then place_for_call(self, record) end
  return all(record.forward(self, ...))
end

local function adopt(parent, value)
  if is_module(value) then
    value[KEY].parent = value[KEY].parent or parent
  elseif is_list(value) then
    for _, item in pairs(value) do
      if is_module(item) then adopt(parent, item) end
    end
  end
end

-- Turns a table of fields into a module.
local function new(text, fields, forward)
  for key, value in pairs(fields) do
    if Module[key] then fail("nn: '%s' is a method of modules; give the field another name", key) end
    adopt(fields, value)
  end
  fields.training = true
  fields[KEY] = {"", meta.__call, forward = forward, text = text}
  return born(setmetatable(fields, meta))
end

-- A module of your own: forward(self, ...) computes with the fields; text is what tostring shows.
function nn.module(fields, forward, text)
  if not is_list(fields) or type(forward) ~= "function" then
    fail("nn.module wants a table of fields and a function: nn.module({conv = nn.conv2d{...}}, function(self, x) ... end)")
  end
  return new(text or "module", fields, forward)
end

-- ==== Methods =====================================================================================

-- The parameters in order, each once.
function Module:parameters()
  local _, tensors = collect(self, "parameter")
  return tensors
end

local function each(names, tensors)
  local i = 0
  return function()
    i = i + 1
    return names[i], tensors[i]
  end
end

-- for name, p in net:named_parameters() do ... end
function Module:named_parameters() return each(collect(self, "parameter")) end
function Module:named_buffers() return each(collect(self, "buffer")) end

-- How many numbers there are to learn.
function Module:count()
  local names, tensors = tensors_of(tree(self))
  local n = 0
  names, tensors = once(names, tensors, "parameter")
  for _, tensor in ipairs(tensors) do n = n + tensor:count() end
  return n
end

local function set_training(self, on)
  self.training = on
  for _, entry in ipairs(tree(self)) do
    if is_module(entry.value) then entry.value.training = on end
  end
  return self
end

function Module:train() return set_training(self, true) end

-- Batch norm's running statistics take in what is pending before anything reads them.
function Module:eval()
  core.stats_commit()
  return set_training(self, false)
end

-- The dtype of all parameters and buffers; before they have memory.
function Module:to(dtype)
  local _, tensors = tensors_of(tree(self))
  for _, tensor in ipairs(tensors) do core.set_dtype(tensor, dtype) end
  return self
end

-- Frozen parameters get no gradients and no updates; freeze(false) thaws them.
function Module:freeze(on)
  local names, tensors = collect(self, "parameter")
  core.freeze(names, tensors, on ~= false)
  return self
end

function Module:zero_grad()
  for _, tensor in ipairs(self:parameters()) do tensor:zero_grad() end
end

-- Fingerprint of all values: parameters, then buffers.
function Module:sha256()
  core.stats_commit()
  return core.sha256(placed_tensors(self))
end

-- For lt.save: names and tensors of all that is worth saving.
function Module:state()
  core.stats_commit()
  return collect(self)
end

local function shape_text(dims, dtype) return table.concat(dims, "x") .. (#dims > 0 and " " or "scalar ") .. dtype end

-- What keeps a file from fitting, as a list of sentences. A tensor may stand in the file under any of its names.
local function differences(file, names, tensors)
  local found, in_file, in_net, list = {}, {}, {}, {}
  for _, name in ipairs(file:names()) do in_file[name] = true end
  for i, name in ipairs(names) do
    in_net[name] = true
    found[tensors[i]] = found[tensors[i]] or in_file[name]
  end
  for i, name in ipairs(names) do
    if not found[tensors[i]] then
      list[#list + 1] = name .. " is missing"
      found[tensors[i]] = true
    elseif in_file[name] then
      local dtype, dims = file:shape(name)
      if table.concat(dims, "x") ~= table.concat(tensors[i].shape, "x") then
        list[#list + 1] = ("%s is %s, the net has %s"):format(name, shape_text(dims, dtype), core.describe(tensors[i]))
      end
    end
  end
  for _, name in ipairs(file:names()) do
    if not in_net[name] then list[#list + 1] = name .. " is not in the net" end
  end
  return list
end

-- Reads what lt.save(path, net) wrote. All names and shapes must agree.
function Module:load(path)
  core.stats_commit()
  local names, tensors = placed_tensors(self)
  local file <close> = core.open_file(path)
  local wrong = differences(file, names, tensors)
  if #wrong > 0 then
    core.fail("EFILE", ("%s does not fit: %s%s"):format(path, table.concat(wrong, "; ", 1, math.min(#wrong, 10)),
              #wrong > 10 and ("; and %d more"):format(#wrong - 10) or ""))
  end
  local in_file = {}
  for _, name in ipairs(file:names()) do in_file[name] = true end
  for i, name in ipairs(names) do
    if in_file[name] then file:read_into(name, tensors[i]) end
  end
  return self
end

-- ==== tostring ====================================================================================

local function function_name(f)
  for name, op in pairs(ops) do
    if op == f then return name end
  end
  local info = debug.getinfo(f, "S")
  return ("function %s:%d"):format(info.short_src, info.linedefined)
end

local function with_commas(n)
  local text = tostring(n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (text:gsub("^,", ""))
end

-- Appends one row {left, count} for each module and function below self.
local function add_rows(self, name, depth, rows, seen)
  local left = ("  "):rep(depth) .. name .. ": "
  if type(self) == "function" then
    rows[#rows + 1] = {left .. function_name(self), ""}
    return
  end
  local count = seen[self] and "shared" or self:count() > 0 and with_commas(self:count()) or ""
  rows[#rows + 1] = {left .. self[KEY].text, count}
  local function add_parts(node, prefix)
    for _, part in ipairs(parts(node, true)) do
      if is_list(part.value) then
        add_parts(part.value, prefix .. part.name .. ".")
      elseif not core.role(part.value) then
        add_rows(part.value, prefix .. part.name, depth + 1, rows, seen)
      end
    end
  end
  if not seen[self] then
    seen[self] = true
    add_parts(self, "")
  end
end

function meta.__tostring(self)
  local rows, width, most = {}, 0, 0
  local path = self[KEY][1]
  add_rows(self, path ~= "" and path or rawget(self, "name") or "net", 0, rows, {})
  for _, row in ipairs(rows) do
    width, most = math.max(width, #row[1]), math.max(most, #row[2])
  end
  for i, row in ipairs(rows) do
    rows[i] = row[2] == "" and row[1] or ("%-" .. width .. "s  %" .. most .. "s"):format(row[1], row[2])
  end
  return table.concat(rows, "\n")
end

-- ==== Parameters ==================================================================================

local initial = check "nn.parameter(shape, {; value=0.0, low?:number, high?:number, mean?:number, deviation?:number})"

local function make_tensor(shape, given, buffer)
  local init = initial(given)
  local kind, a, b = "constant", init.value, 0
  if init.low or init.high then kind, a, b = "uniform", init.low or 0, init.high or 0 end
  if init.mean or init.deviation then kind, a, b = "normal", init.mean or 0, init.deviation or 1 end
  return born(core.new_parameter(shape, kind, a, b, buffer))
end

-- A field that is learnt: nn.parameter({64, 3}, {low = -0.1, high = 0.1}); or a normal one by mean and deviation.
function nn.parameter(shape, init) return make_tensor(shape, init, false) end
-- A field that is saved but not learnt.
function nn.buffer(shape, init) return make_tensor(shape, init, true) end

-- PyTorch's default for weights and biases: uniform within 1 / sqrt(fan_in).
local function weights(shape, fan_in)
  local bound = 1 / math.sqrt(fan_in)
  return nn.parameter(shape, {low = -bound, high = bound})
end

-- ==== Modules with parameters =====================================================================

local conv2d = check "nn.conv2d{in, out, kernel:pair; stride:pair=1, pad:pair=0, dilation:pair=1, groups:count=1, bias=true}"

function nn.conv2d(given)
  local f, text = conv2d(given)
  local kernel = type(f.kernel) == "table" and f.kernel or {f.kernel, f.kernel}
  local each_group = f["in"] // f.groups
  if f["in"] % f.groups ~= 0 or f.out % f.groups ~= 0 then
    fail("nn.conv2d: 'groups' must divide 'in' and 'out', they are %d, %d and %d", f.groups, f["in"], f.out)
  end
  local fan_in = math.max(kernel[1] * kernel[2] * each_group, 1)
  f.w = weights({f.out, kernel[1], kernel[2], each_group}, fan_in)
  f.b = f.bias and weights({f.out}, fan_in) or nil
  return new(text, f, function(self, x)
    return ops.conv2d(x, self.w, self.b, self.stride, self.pad, self.dilation, self.groups)
  end)
end

local linear = check "nn.linear{in, out; bias=true}"

function nn.linear(given)
  local f, text = linear(given)
  f.w = weights({f.out, f["in"]}, f["in"])
  f.b = f.bias and weights({f.out}, f["in"]) or nil
  return new(text, f, function(self, x) return ops.linear(x, self.w, self.b) end)
end

local batch_norm = check "nn.batch_norm{channels; momentum=0.1, eps=1e-5}"

function nn.batch_norm(given)
  local f, text = batch_norm(given)
  f.scale, f.shift = nn.parameter({f.channels}, {value = 1}), nn.parameter({f.channels})
  f.mean, f.var = nn.buffer({f.channels}), nn.buffer({f.channels}, {value = 1})
  return new(text, f, function(self, x)
    return ops.batch_norm(x, self.scale, self.shift, self.mean, self.var, self.training, self.momentum, self.eps)
  end)
end

local layer_norm = check "nn.layer_norm{n; eps=1e-5}"

function nn.layer_norm(given)
  local f, text = layer_norm(given)
  f.scale, f.shift = nn.parameter({f.n}, {value = 1}), nn.parameter({f.n})
  return new(text, f, function(self, x) return ops.layer_norm(x, self.scale, self.shift, self.eps) end)
end

local embedding = check "nn.embedding{rows, dim}"

function nn.embedding(given)
  local f, text = embedding(given)
  f.w = nn.parameter({f.rows, f.dim}, {mean = 0, deviation = 1})
  return new(text, f, function(self, ids) return ops.embedding(self.w, ids) end)
end

-- ==== Modules of modules ==========================================================================

local function check_layer(key, value)
  for name, maker in pairs(nn) do
    if value == maker then fail("nn.sequential: layer %s is the maker nn.%s; write nn.%s{...}", key, name, name) end
  end
  if not is_module(value) and type(value) ~= "function" then
    fail("nn.sequential: layer %s wants a module or a function, it is a %s", key, type(value))
  end
  if type(key) == "string" and type(value) == "function" then
    fail("nn.sequential: layer '%s' is a function, whose place among names is not known; use a module or numbers", key)
  end
end

local function run_numbered(self, x)
  for i = 1, #self do x = self[i](x) end
  return x
end

local function run_named(self, x)
  for _, key in ipairs(self[KEY].order) do x = self[key](x) end
  return x
end

-- One layer after the other: modules and functions by number, or modules by name, which then run in the order of their
-- making: that of the text when they are made in place. The string field `name` is the root's name in messages.
function nn.sequential(layers)
  if not is_list(layers) then fail("nn.sequential wants one table of layers: nn.sequential{nn.conv2d{...}, lt.relu}") end
  local numbers, names = 0, 0
  for key, value in pairs(layers) do
    if key ~= "name" or type(value) ~= "string" then
      check_layer(key, value)
      if math.type(key) then numbers = numbers + 1 else names = names + 1 end
    end
  end
  if numbers > 0 and names > 0 then fail("nn.sequential: layers have numbers or names, not both") end
  for i = 1, numbers do
    if layers[i] == nil then fail("nn.sequential: layer %d is nil", i) end
  end
  local self = new("sequential", layers, names > 0 and run_named or run_numbered)
  if names > 0 then
    self[KEY].order = {}
    for i, part in ipairs(parts(self)) do self[KEY].order[i] = part.key end
  end
  return self
end

local residual = check "nn.residual{body:layer; skip?:layer}"

-- body(x) + x, or body(x) + skip(x).
function nn.residual(given)
  return new("residual", residual(given), function(self, x)
    local short = x
    if self.skip then short = self.skip(x) end
    return self.body(x) + short
  end)
end

-- ==== Modules without parameters ==================================================================

-- nn.relu() for lt.relu, and so on.
for _, name in ipairs{"relu", "relu6", "gelu", "sigmoid", "tanh", "global_avg_pool2d"} do
  local spec = check("nn." .. name .. "{}")
  nn[name] = function(given)
    local f, text = spec(given)
    return new(text, f, function(_, x) return ops[name](x) end)
  end
end

for _, name in ipairs{"max_pool2d", "avg_pool2d"} do
  local spec = check("nn." .. name .. "{kernel:pair; stride:pair=kernel, pad:pair=0}")
  nn[name] = function(given)
    local f, text = spec(given)
    return new(text, f, function(self, x) return ops[name](x, self.kernel, self.stride, self.pad) end)
  end
end

local dropout = check "nn.dropout{p=0.5}"

function nn.dropout(given)
  local f, text = dropout(given)
  return new(text, f, function(self, x) return ops.dropout(x, self.p, self.training) end)
end

local flatten_spec = check "nn.flatten{}"

-- (n, h, w, c) to (n, h w c).
function nn.flatten(given)
  local f, text = flatten_spec(given)
  return new(text, f, function(_, x)
    local features = 1
    for axis = 2, #x.shape do features = features * x:dim(axis) end
    return x:reshape({x:dim(1), features})
  end)
end

nn.is_module = is_module
return check.strict(nn, "nn")
