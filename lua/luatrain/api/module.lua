-- module.lua - modules: callable trees of parts.
--
-- A module is a plain table. Its fields are its parts (parameters, buffers, other modules, and
-- lists of these) and its settings. It is called like a function. Parts are ordered by their time
-- of creation, or by number in a list. Each has a name in the tree: net[4].w is "4.w",
-- net.block1.conv.w is "block1.conv.w".
--
-- Parameters are made without memory. The whole tree gets memory at once when any part of it is
-- first called, listed, loaded, saved or given to an optimizer. To find the whole tree, a module
-- keeps a link to its parent.
--
-- Each module has a private record, under a key that is not a string: [1], its path "net.4"; [2],
-- the function that calls it, by which the binding finds it on the stack (bind/error.c); forward;
-- text, for tostring; parameters, the names of forward's parameters; kind and takes, for nn.lua;
-- parent; placed, whether its tensors have memory; order, the keys of its parts if they are fixed.

local core = ...
local arity = require "luatrain.arity"
local shown = require "luatrain.check".shown
local thousands = require "luatrain.thousands"
local ops = core.ops
local KEY = core.module_key

local exports = {}
local Module = arity.methods("net:", "luatrain.Module")               -- the methods of all modules
local meta = {__index = Module, __name = "luatrain.Module"}
local creations = setmetatable({}, {__mode = "k"})   -- modules, tensors -> counter at creation
local n_created = 0

local function fail(...) core.fail("EINVAL", string.format(...)) end
function exports.is_module(value) return type(value) == "table" and rawget(value, KEY) ~= nil end
function exports.is_list(value) return type(value) == "table" and getmetatable(value) == nil end
local is_module, is_list = exports.is_module, exports.is_list

local function record_creation(value)
  n_created = n_created + 1
  creations[value] = n_created
  return value
end

-- ==== The tree ===================================================================================

-- The creation counter of a part, or the smallest one in a list of parts; nil for other values.
local function creation_of(value)
  if creations[value] or not is_list(value) then return creations[value] end
  local first
  for _, item in pairs(value) do
    local birth = creations[item]
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

-- Returns the parts of a module or list in order, each {key, name, value, birth}. `functions`
-- includes functions, which only tostring shows.
local function parts(node, functions)
  local list = {}
  for key, value in pairs(node) do
    local birth = key ~= KEY and creation_of(value)
    if functions and type(value) == "function" then birth = math.huge end
    if birth then
      list[#list + 1] = {key = key, name = tostring(key), value = value, birth = birth}
    end
  end
  table.sort(list, by_order)
  return list
end

-- Appends {name, value, owner} to list for each module and tensor below a node; a module comes
-- before its parts. owner is the module that contains it; above is the set of the node's ancestors.
local function flatten(node, prefix, owner, list, above)
  if above[node] then
    local what = is_module(node) and node[KEY].text or "a list in " .. owner[KEY].text
    fail("nn: %s contains itself", what)
  end
  above[node] = true
  local found = parts(node)
  local order = is_module(node) and node[KEY].order
  if order and #order ~= #found then
    fail("%s: layers cannot be added or removed after it is made", node[KEY].text)
  end
  for _, part in ipairs(found) do
    local name, value = prefix .. part.name, part.value
    if not is_list(value) then list[#list + 1] = {name = name, value = value, owner = owner} end
    if type(value) == "table" then
      flatten(value, name .. ".", is_module(value) and value or owner, list, above)
    end
  end
  above[node] = nil
  return list
end

local function tree(module) return flatten(module, "", module, {}, {}) end

-- The names and tensors in a list of flatten(), in order. A shared tensor appears several times.
local function tensors_of(list)
  local names, tensors = {}, {}
  for _, entry in ipairs(list) do
    if not is_module(entry.value) then
      names[#names + 1], tensors[#tensors + 1] = entry.name, entry.value
    end
  end
  return names, tensors
end

-- The module that directly contains `module`: root or a module below it. nil if none does.
local function owner_in(root, module)
  for _, entry in ipairs(tree(root)) do
    if entry.value == module then return entry.owner end
  end
end

-- The parent of a module, or nil. Checks the link, since the module may have been removed.
local function parent_of(module)
  local record = module[KEY]
  record.parent = record.parent and owner_in(record.parent, module)
  return record.parent
end

local function name_of_root(root)
  local name = rawget(root, "name")
  return type(name) == "string" and name or "net"
end

-- Gives memory to the whole tree that contains a module, and sets the path of every module in it.
local function place(module)
  local root = module
  while parent_of(root) do root = parent_of(root) end
  local list = tree(root)
  core.place(tensors_of(list))
  local path = name_of_root(root)
  root[KEY][1], root[KEY].placed = path, true
  for i = #list, 1, -1 do      -- backwards, so that a shared module keeps its first name
    local entry = list[i]
    if is_module(entry.value) then
      local record = entry.value[KEY]
      record[1], record.parent, record.placed = path .. "." .. entry.name, entry.owner, true
    end
  end
end

-- The names and tensors below a module. Places the tree first if a tensor has no memory yet.
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

-- Filters names and tensors: keeps each tensor once, under its first name, if its role is `role`,
-- "parameter" or "buffer"; nil keeps both.
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

-- ==== Calling ====================================================================================

-- Places a module that is called for the first time. If it was assigned to a field after its parent
-- was made, it has no parent link yet; the parent is then its caller or below its caller.
local function place_for_call(module, record)
  local caller = core.active_module(module)
  if caller and not parent_of(module) then
    record.parent = owner_in(caller, module)
    if not record.parent then
      fail("%s is called but is not a field of its caller, so it would not be trained or saved",
           record.text)
    end
  end
  place(module)
end

local function all(...) return ... end

-- Calls forward. Must not be a tail call: core.active_module() and error messages find the running
-- module by the frame of this function.
function meta.__call(self, ...)
  local record = self[KEY]
  local names = record.parameters
  if not record.placed then place_for_call(self, record) end
  if names and select("#", ...) > #names then
    local wrong = arity.excess(record.text, names, ...)
    if wrong then core.fail("EINVAL", wrong) end
  end
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

-- Turns a table of fields into a module, in place. forward(self, ...) computes its result; tostring
-- shows text. nn.lua uses kind and takes to fuse the module with its neighbours.
function exports.new(text, fields, forward, kind, takes)
  for key, value in pairs(fields) do
    if Module[key] then
      fail("nn: '%s' is a method of modules; give the field another name", key)
    end
    adopt(fields, value)
  end
  fields.training = true
  fields[KEY] = {"", meta.__call, forward = forward, text = text, kind = kind, takes = takes,
                 parameters = arity.parameters_of(forward, 1)}
  return record_creation(setmetatable(fields, meta))
end

-- A new parameter, or a buffer, with its initialiser: see new_parameter in bind/optim.c.
function exports.tensor(shape, kind, a, b, buffer)
  return record_creation(core.new_parameter(shape, kind, a, b, buffer))
end

-- Fixes the set of a module's parts: later changes to it are errors. Returns their keys in order.
function exports.fix_parts(self)
  local order = {}
  for i, part in ipairs(parts(self)) do order[i] = part.key end
  self[KEY].order = order
  return order
end

-- ==== Methods ====================================================================================

-- The list of all parameters in order, each once.
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

-- The number of elements of all parameters.
function Module:count()
  local n = 0
  local names, tensors = tensors_of(tree(self))
  local _, parameters = once(names, tensors, "parameter")
  for _, tensor in ipairs(parameters) do n = n + tensor:count() end
  return n
end

-- A module and all modules in its tree.
local function modules(self)
  local list = {self}
  for _, entry in ipairs(tree(self)) do
    if is_module(entry.value) then list[#list + 1] = entry.value end
  end
  return list
end

local function set_training(self, on)
  for _, module in ipairs(modules(self)) do module.training = on end
  return self
end

function Module:train() return set_training(self, true) end

-- Sets eval mode. First brings batch norm's running statistics up to date.
function Module:eval()
  core.bn_stats_synchronize()
  return set_training(self, false)
end

-- Whether a module, or a module in its tree, is in training mode.
function exports.is_training(self)
  for _, module in ipairs(modules(self)) do
    if module.training then return true end
  end
  return false
end

-- Returns a function that restores the current mode of every module in the tree.
function exports.save_modes(self)
  local before = {}
  for _, module in ipairs(modules(self)) do before[module] = module.training end
  return function()
    for module, training in pairs(before) do module.training = training end
  end
end

-- Sets the dtype of all parameters and buffers. Must be called before they have memory.
function Module:to(dtype)
  if tostring(dtype):find "^[cg]pu" or tostring(dtype):find "^cuda" then
    fail("net:to requires a dtype, such as 'f64', but got '%s'; a net is on the device of the "
         .. "program: luatrain --device %s", dtype, dtype)
  end
  local _, tensors = tensors_of(tree(self))
  for _, tensor in ipairs(tensors) do core.set_dtype(tensor, dtype) end
  return self
end

-- Freezes all parameters: they get no gradients and no updates. freeze(false) unfreezes them.
function Module:freeze(on)
  if on ~= nil and type(on) ~= "boolean" then
    fail("net:freeze requires true or false, but got %s", shown(on))
  end
  local names, tensors = collect(self, "parameter")
  core.freeze(names, tensors, on ~= false)
  return self
end

function Module:zero_grad()
  for _, tensor in ipairs(self:parameters()) do tensor:zero_grad() end
end

-- SHA-256 of all parameters and buffers, as a string of hexadecimal digits.
function Module:sha256()
  core.bn_stats_synchronize()
  return core.sha256(placed_tensors(self))
end

-- The names and values of all modules and tensors of a net, in order; a shared one appears several
-- times, under all its names.
function exports.contents(net)
  local names, values = {}, {}
  for i, entry in ipairs(tree(net)) do names[i], values[i] = entry.name, entry.value end
  return names, values
end

-- The names and tensors that lt.save writes: all parameters and buffers, each once.
function Module:state()
  core.bn_stats_synchronize()
  return collect(self)
end

local function set_of(list)
  local set = {}
  for _, item in ipairs(list) do set[item] = true end
  return set
end

-- Compares the given tensors with those tensors of a file that have names with this prefix. Returns
-- a list of messages, one for each difference. owner names the object that has the given tensors. A
-- shared tensor may be in the file under any of its names.
local function differences(file, in_file, prefix, names, tensors, owner)
  local found, wanted, list = {}, {}, {}
  for i, name in ipairs(names) do
    name = prefix .. name
    wanted[name] = true
    found[tensors[i]] = found[tensors[i]] or in_file[name]
  end
  for i, name in ipairs(names) do
    name = prefix .. name
    if not found[tensors[i]] then
      list[#list + 1] = name .. " is missing"
      found[tensors[i]] = true
    elseif in_file[name] then
      local has, wants = file:shape(name), table.concat(tensors[i].shape, "x")
      if has ~= wants then
        list[#list + 1] = ("%s is %s, but the %s has %s"):format(name, has, owner, wants)
      end
    end
  end
  for _, name in ipairs(file:names()) do
    if name:sub(1, #prefix) == prefix and not wanted[name] then
      list[#list + 1] = ("%s is not in the %s"):format(name, owner)
    end
  end
  return list
end

-- Reads the tensor prefix .. names[i] of an open file into tensors[i], for each i. EFILE, and
-- nothing is read, unless all names with this prefix and all shapes match. owner ("net" if nil)
-- names the object that has the tensors in the error.
function exports.read_file(file, path, prefix, names, tensors, owner)
  local in_file = set_of(file:names())
  local wrong = differences(file, in_file, prefix, names, tensors, owner or "net")
  if #wrong > 0 then
    local text = table.concat(wrong, "; ", 1, math.min(#wrong, 10))
    if #wrong > 10 then text = ("%s; and %d more"):format(text, #wrong - 10) end
    core.fail("EFILE", ("%s does not fit: %s"):format(path, text))
  end
  for i, name in ipairs(names) do
    if in_file[prefix .. name] then file:read_into(prefix .. name, tensors[i]) end
  end
end

-- Loads a file written by lt.save(path, net), or the net of a run's checkpoint. EFILE unless all
-- names and shapes match.
function Module:load(path)
  core.bn_stats_synchronize()
  local file <close> = core.open_file(path)
  file:verify()
  local meta = file:meta()
  local is_checkpoint = meta.counter and (meta.optim or ""):find "^optim%."
  exports.read_file(file, path, is_checkpoint and "net." or "", placed_tensors(self))
  return self
end

-- ==== tostring ===================================================================================

local function function_name(f)
  for name, op in pairs(ops) do
    if op == f then return name end
  end
  local info = debug.getinfo(f, "S")
  return ("function %s:%d"):format(info.short_src, info.linedefined)
end

-- Appends a row {left, count}, the two columns of tostring, for self and for each module and
-- function below it.
local function add_rows(self, name, depth, rows, seen)
  local left = ("  "):rep(depth) .. name .. ": "
  if type(self) == "function" then
    rows[#rows + 1] = {left .. function_name(self), ""}
    return
  end
  local count = seen[self] and "shared" or self:count() > 0 and thousands(self:count()) or ""
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
  add_rows(self, path ~= "" and path or name_of_root(self), 0, rows, {})
  for _, row in ipairs(rows) do
    width, most = math.max(width, #row[1]), math.max(most, #row[2])
  end
  local format = ("%%-%ds  %%%ds"):format(width, most)
  for i, row in ipairs(rows) do
    rows[i] = row[2] == "" and row[1] or format:format(row[1], row[2])
  end
  return table.concat(rows, "\n")
end

return exports
