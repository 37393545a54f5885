-- summary.lua - a table of a net's layers for a batch: output shapes, parameters, floating-point
-- operations, and the bytes that are kept for backward.
--
--   print(lt.summary(net, {32, 28, 28, 1}))
--
-- The net is called with zeros, and every call of a module and every op is recorded. All counts are
-- linear in the batch size, so calls with two and three images suffice to compute them for any
-- batch, even one that does not fit this machine.

local core = ...
local arity = require "luatrain.arity"
local flops_of = require "luatrain.commands.flops"
local module = require "luatrain.api.module"
local thousands = require "luatrain.thousands"

local summary = {}
local KEY = core.module_key
local WIDTH = 100              -- largest width of the table

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- ==== Tracing ====================================================================================

local function shape_of(x) return core.is_tensor(x) and x.shape end

-- Returns the bytes of the tensors that are saved for the backward of the op that made out. Skips
-- memory that is in seen, and adds the rest to it. Also skips half-precision copies of parameters,
-- which have a role: they exist once, not once per step.
local function kept_by(out, seen)
  local bytes, i = 0, 1
  local tensor = core.saved(out, i)
  while tensor do
    local memory, size = core.memory_of(tensor)
    if not seen[memory] and not core.role(tensor) then bytes = bytes + size end
    seen[memory] = true
    i = i + 1
    tensor = core.saved(out, i)
  end
  return bytes
end

local function new_node(fields)
  fields.flops, fields.kept, fields.shape = 0, 0, {}
  return fields
end

-- Returns a value for a <close> variable. It calls f when the variable goes out of scope, also
-- after an error.
local function finally(f) return setmetatable({}, {__close = f}) end

-- Calls net(x) and returns the calls as a tree. Fields of a node: module, or op if it is an op;
-- shape of its output; flops and kept, including its children's. The children are its list items.
local function trace(net, shape)
  local class, root = getmetatable(net), new_node{}
  local call, current, seen, alive = class.__call, root, {}, {}
  local _, weights = net:state()
  local dtype = weights[1] and weights[1].dtype
  for _, tensor in ipairs(weights) do seen[core.memory_of(tensor)] = true end

  local function called(self, ...)
    local node, outer = new_node{module = self}, current
    outer[#outer + 1], current = node, node
    local results = table.pack(call(self, ...))
    current = outer
    outer.flops, outer.kept = outer.flops + node.flops, outer.kept + node.kept
    if core.is_tensor(results[1]) then node.shape = results[1].shape end
    return table.unpack(results, 1, results.n)
  end

  local function done(name, out, x, w)
    if not out then return end
    alive[#alive + 1] = out                    -- keeps its memory from being reused
    local node = new_node{op = name}
    current[#current + 1] = node
    node.shape, node.kept = out.shape, kept_by(out, seen)
    node.flops = flops_of(name, shape_of(x), shape_of(w), node.shape)
    current.flops, current.kept = current.flops + node.flops, current.kept + node.kept
  end

  local _ <close> = finally(function()
    class.__call = call
    core.observe(nil)
  end)
  class.__call = called
  core.observe(done)
  core.step(function() net(core.constructors.zeros(shape, {dtype = dtype})) end)
  return root[1]
end

-- Extrapolates the trees for batches of 2 and 3, a and b, to a batch of n.
local function extend(a, b, n)
  if #a ~= #b or a.op ~= b.op then
    fail("lt.summary: the net does not run the same ops for 2 images and for 3")
  end
  local function at(first, second) return first + (second - first) * (n - 2) end
  local node = {module = a.module, op = a.op, shape = {}}
  node.flops, node.kept = at(a.flops, b.flops), at(a.kept, b.kept)
  for i, dim in ipairs(a.shape) do node.shape[i] = at(dim, b.shape[i]) end
  for i, child in ipairs(a) do node[i] = extend(child, b[i], n) end
  return node
end

-- Traces a net without side effects: restores running statistics and random numbers.
local function look(net, shape)
  local buffers = {}
  for _, buffer in net:named_buffers() do
    buffers[buffer] = core.constructors.zeros(buffer.shape, {dtype = buffer.dtype}):copy(buffer)
  end
  local _ <close> = finally(function()
    core.bn_stats_synchronize()
    for buffer, before in pairs(buffers) do buffer:copy(before) end
    core.set_first_row(0)
  end)
  local two, three = table.move(shape, 2, #shape, 2, {2}), table.move(shape, 2, #shape, 2, {3})
  return extend(trace(net, two), trace(net, three), shape[1])
end

-- ==== The table ==================================================================================

-- Sets the parameter count of each node, 0 if its module was seen before, and `same`, a string that
-- is equal for equivalent nodes.
local function label(node, seen)
  local self = node.module
  node.shared = self and seen[self]
  node.count = self and not node.shared and self:count() or 0
  node.text = self and self[KEY].text or node.op
  if self then seen[self] = true end
  local parts = {node.text, table.concat(node.shape, "x"), node.flops, node.kept, node.count}
  for _, child in ipairs(node) do
    label(child, seen)
    node.nested = node.nested or child.module ~= nil
    parts[#parts + 1] = "(" .. child.same .. ")"
  end
  node.same = table.concat(parts, " ")
end

-- The name of a node's module relative to its parent's module; nil for an op.
local function name_of(node, outer)
  local path = node.module and node.module[KEY][1]
  local above = outer and outer.module[KEY][1] .. "."
  if path and above and path:sub(1, #above) == above then return path:sub(#above + 1) end
  return path
end

-- The name of a node, "2", or of several consecutive nodes, "2-4".
local function names_of(first, last, outer)
  local name, other = name_of(first, outer), name_of(last, outer)
  if not name or name == other then return name end
  local head, tail = name:match "^(.-)(%d+)$", other:match "%d+$"
  if head and other == head .. (tail or "") then return name .. "-" .. tail end
  return name .. " to " .. other
end

-- Appends a row for n equivalent consecutive nodes, from first to last, and the rows of the first
-- one's children.
local function add_rows(rows, first, last, n, outer, depth)
  local name = names_of(first, last, outer)
  local text = (name and name .. ": " or "") .. first.text .. (n > 1 and ", each of " .. n or "")
  rows[#rows + 1] = {("  "):rep(depth) .. text, first}
  if not first.nested then return end            -- lists ops only if there are modules too
  local i = 1
  while i <= #first do
    local j = i
    while first[j + 1] and first[j + 1].same == first[i].same do j = j + 1 end
    add_rows(rows, first[i], first[j], j - i + 1, first, depth + 1)
    i = j + 1
  end
end

-- The largest unit in which an amount is at least `least`, else the smallest. Returns its prefix
-- and its size.
local function unit_of(amount, least)
  for _, unit in ipairs{{"T", 1e12}, {"G", 1e9}, {"M", 1e6}} do
    if amount >= least * unit[2] then return table.unpack(unit) end
  end
  return "K", 1e3
end

local function amount_text(amount, what)
  local prefix, unit = unit_of(amount, 1)
  return ("%.2f %s%s"):format(amount / unit, prefix, what)
end

local function write(net, root, n)
  local flop_prefix, flop_unit = unit_of(root.flops, 100)
  local byte_prefix, byte_unit = unit_of(root.kept, 100)
  local rows, widths, list = {}, {0, 0, 0, 0, 0}, {}
  add_rows(rows, root, root, 1, nil, 0)
  for i, row in ipairs(rows) do
    local node = row[2]
    rows[i] = {
      row[1], table.concat(node.shape, "x"),
      node.shared and "shared" or node.count > 0 and thousands(node.count) or "",
      node.flops > 0 and ("%.1f"):format(node.flops / flop_unit) or "",
      node.kept > 0 and ("%.1f"):format(node.kept / byte_unit) or ""}
  end
  table.insert(rows, 1, {"layer", "output", "parameters", flop_prefix .. "FLOP",
                         byte_prefix .. "B"})
  for _, row in ipairs(rows) do
    for i, text in ipairs(row) do widths[i] = math.max(widths[i], #text) end
  end
  widths[1] = math.min(widths[1], WIDTH - widths[2] - widths[3] - widths[4] - widths[5] - 8)
  local format = ("%%-%ds  %%%ds  %%%ds  %%%ds  %%%ds"):format(table.unpack(widths))
  for i, row in ipairs(rows) do
    if #row[1] > widths[1] then row[1] = row[1]:sub(1, widths[1] - 3) .. "..." end
    list[i] = format:format(table.unpack(row)):gsub(" +$", "")
  end
  list[#list + 1] = ("\n%s parameters; a batch of %d: %s forward, %s kept for backward, incl. the "
                     .. "batch"):format(thousands(net:count()), n, amount_text(root.flops, "FLOP"),
                                        amount_text(root.kept, "B"))
  list[#list + 1] = "FLOP: 2 per multiply-add; counts only convolutions, linear layers and matmuls"
  return table.concat(list, "\n")
end

local function is_shape(shape)
  if type(shape) ~= "table" or #shape == 0 then return false end
  for _, dim in ipairs(shape) do
    if type(dim) ~= "number" or not math.tointeger(dim) or dim < 1 then return false end
  end
  return true
end

-- lt.summary(net, {n, h, w, c}): returns the table as text, for a batch of n images.
local function summarize(_, net, shape)
  if not module.is_module(net) or not is_shape(shape) then
    fail("lt.summary requires a net and the shape of its input: lt.summary(net, {n, h, w, c})")
  end
  local root = look(net, shape)
  label(root, {})
  return write(net, root, shape[1])
end

-- Prepares `luatrain summary script.lua`: the script's first run will show its net and end the
-- script. Returns the index of the script among the arguments, and a function to call after it.
function summary.attach(script)
  local shown = false
  if not script or script:sub(1, 1) == "-" then
    core.fail("EUSAGE", "summary requires a script: luatrain [options] summary train_lenet.lua")
  end
  core.on_run = function(settings)
    local train = settings.train
    local shape = {settings.batch, train.height, train.width, train.channels}
    local amp = settings.amp == "auto" and "off" or settings.amp
    io.stdout:write(core.autocast(amp, summarize, nil, settings.net, shape), "\n")
    shown = true
    core.fail("EDONE", "the summary is shown")
  end
  return 1, function()
    if shown then return end
    core.fail("ESCRIPT", ("summary: %s calls neither lt.run nor lt.fit, so there is no net to show")
              :format(script))
  end
end

return setmetatable(summary, {
  __call = arity.of_method(summarize, "lt.summary", {"net", "shape"}),
})
