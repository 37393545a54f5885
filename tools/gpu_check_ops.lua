-- gpu_check_ops.lua - compares ops on a device with the CPU. Prints a line of JSON per op and dtype
-- as soon as it is done. If the process crashes in an op, tools/gpu_check restarts it after the op.
--
-- The inputs are rounded to the dtype. The expected results are those of the CPU's kernels in f64,
-- or PyTorch's, from the files PREFIX-DTYPE of tests/oracle/make.py.
local lt = require "luatrain"
local cases = require "gpu_cases"
local json = require "luatrain.json"

local opt = lt.args{
  after = "", dtypes = "f32,f16,bf16", ops = "", small = false, peer = "", layers = false,
  images = 2, channels = 0, side = 0,
  help = {
    after = "start after this op and dtype", dtypes = "dtypes to check", ops = "ops to check",
    small = "skip cases of more than 4096 numbers",
    peer = "prefix of the files with PyTorch's results",
    layers = "instead: check the layers of the three networks",
    images = "images of a layer", channels = "maximum channels of a layer; 0: no maximum",
    side = "maximum side of a layer's images; 0: no maximum",
  }}

local root = (arg[0]:match "^(.*)/" or ".") .. "/.."
local device = lt.zeros{1}.device

local function say(row)
  io.stdout:write(json.text(row), "\n")
  io.stdout:flush()
end

-- ==== Cases ======================================================================================

local truths = {}             -- dtype -> the peer's results by name
if opt.peer ~= "" then
  for dtype in opt.dtypes:gmatch "[^,]+" do
    truths[dtype] = lt.load(opt.peer .. dtype .. ".safetensors")
  end
end

local function peer_truth(c, dtype, own)
  if not truths[dtype] then return own end
  local truth = {}
  for name, x in pairs(own) do
    local theirs = truths[dtype][c.key .. "." .. name]
    if theirs then
      truth[name] = theirs:to "cpu":cast "f64"
    else                      -- the gradient is zero, or the input is unchanged
      truth[name] = name:find "^grad" and x * 0.0 or x
    end
  end
  return truth
end

-- A message if a result has the wrong dtype, else nil. is: the result's dtype; dtype: the inputs'
-- dtype; in_f64: the result's dtype for f64 inputs.
local function wrong_dtype(c, name, is, dtype, in_f64)
  if in_f64 ~= "f64" or is == dtype or c.options.dtype or is == "f64" then return nil end
  if is == "f32" and c.op == "add_squares" then return nil end
  return ("%s is %s"):format(name, is)
end

-- Checks one case and adds the result to the row.
local function check(c, dtype, row)
  local given = cases.given(c, dtype)
  local own, in_f64 = cases.run(c, given, "f64", "cpu")
  local truth, wobble = peer_truth(c, dtype, own), cases.wobble(c, given, own)
  local got, dtypes = cases.run(c, given, dtype, device, true)
  for name, want in pairs(truth) do
    local worst = 1 / 0
    if got[name] then
      local kept = dtypes[name] == "f64" and "f32" or dtypes[name]
      worst = cases.worst(got[name], want, kept, cases.margin(c, name, kept, given, wobble))
    end
    if worst ~= worst or worst > row.worst then
      row.worst, row.where = worst, ("line %d, %s"):format(c.line, name)
    end
    row.error = row.error or got[name] and wrong_dtype(c, name, dtypes[name], dtype, in_f64[name])
  end
  if not cases.same(got, (cases.run(c, given, dtype, device, true))) then
    row.other_bits = ("line %d"):format(c.line)
  end
end

local function skips(c, dtype)
  return opt.small and c.large or dtype ~= "f32" and c.notes:find "f32%+f64"
end

local of_cases = {check = check, skips = skips, name = function(c) return "line " .. c.line end}

-- Checks all cases or layers of an op in a dtype. Returns the row.
local function walk(kind, list, op, dtype)
  local row = {name = op, dtype = dtype, cases = 0, worst = 0.0}
  for _, c in ipairs(list) do
    if c.op == op and not kind.skips(c, dtype) then
      local ok, why = pcall(lt.step, kind.check, c, dtype, row)
      row.cases = row.cases + 1
      if not ok then
        row.error = ("%s: %s"):format(kind.name(c), tostring(why))
        break
      end
    end
  end
  return row
end

-- ==== Layers =====================================================================================

-- The numbers after each name in a line of tests/cuda/graphs.txt: x = {56, 56, 64} for
-- "x 56x56x64".
local function numbers_of(text)
  local found = {}
  for name, words in text:gmatch " (%l+) ([%dx]+)" do
    found[name] = {}
    for word in words:gmatch "%d+" do table.insert(found[name], math.tointeger(word)) end
  end
  return found
end

local function most(value, limit) return limit > 0 and math.min(value, limit) or value end

-- Parses a layer: its op, the shapes of its inputs, its options, and the number of terms of the
-- sums in its output and in the gradient of each input.
local function layer_of(text)
  local op, v = text:match "^%S+", numbers_of(text)
  local height, width = most(v.x[1], opt.side), most(v.x[2], opt.side)
  local c, out = most(v.x[3], opt.channels), most(v.y[3], opt.channels)
  local x = {opt.images, height, width, c}
  if op ~= "conv2d" then
    local kernel = {most(v.kernel[1], height), most(v.kernel[2], width)}
    local area = kernel[1] * kernel[2]
    return {op = op, shapes = {x}, options = {kernel = kernel, stride = v.stride, pad = v.pad},
            terms = {area, area}}
  end
  local groups = v.groups[1] > 1 and c or 1
  local w = {out, v.kernel[1], v.kernel[2], c // groups}
  local area, pixels = w[2] * w[3], opt.images * height * width // (v.stride[1] * v.stride[2])
  return {op = groups > 1 and "depthwise" or op, shapes = {x, w, v.bias[1] > 0 and {out} or nil},
          options = {stride = v.stride, pad = v.pad, groups = groups},
          terms = {area * w[4], area * out // groups, pixels, pixels}}
end

-- The layers in the file, and the batch norms and linear layers of the networks.
local function read_layers(path)
  local list, rows = {}, opt.channels > 0 and 3 or 64
  for text in io.lines(path) do
    if text:find "^%l" then list[#list + 1] = layer_of(text) end
  end
  for i = 1, #list do
    local x, w = table.unpack(list[i].shapes)
    if list[i].op == "conv2d" and w[2] == 3 then
      local c = {x[4]}
      list[#list + 1] = {op = "batch_norm", shapes = {x, c, c, c, c}, options = {train = true},
                         terms = {1, 1, x[1] * x[2] * x[3], x[1] * x[2] * x[3]}}
    end
  end
  for _, sizes in ipairs{{2048, 1000}, {1024, 1000}, {4096, 4096}} do
    local columns, out = most(sizes[1], opt.channels), most(sizes[2], opt.channels)
    list[#list + 1] = {op = "linear", shapes = {{rows, columns}, {out, columns}, {out}},
                       options = {}, terms = {columns, out, rows, rows}}
  end
  return list
end

-- Input i of a layer: random numbers; for max_pool2d, numbers that differ within each window and
-- are exact in bf16.
local function values_of(layer, i, dtype)
  local where = {device = "cpu"}
  if layer.op ~= "max_pool2d" then
    local x = lt.randn(layer.shapes[i], where)
    return (layer.op == "batch_norm" and i == 5 and x:abs() or x):cast(dtype)
  end
  local n, h, w, c = table.unpack(layer.shapes[i])
  local x = lt.arange(h * w, {dtype = "i64", device = "cpu"}) * 138
  x = (x - x // 251 * 251):cast "f32":reshape{1, h, w, 1}
  return (lt.zeros({n, h, w, c}, where) + x):cast(dtype)
end

-- Runs a layer. Returns its output and its gradients by name, on the CPU in f64.
local function run_layer(layer, inputs, dy, where, dtype)
  local leaves, args = {}, {}
  for i, x in ipairs(inputs) do
    leaves[i] = x:cast(dtype):to(where)
    leaves[i]:requires_grad()
    args[i] = leaves[i]
  end
  args[#args + 1] = layer.options
  local y = lt[layer.op == "depthwise" and "conv2d" or layer.op](table.unpack(args))
  local found = {["out.0"] = y}
  y:backward(dy(y.shape):cast(dtype):to(where))
  for i, x in ipairs(leaves) do found["grad." .. i] = x.grad end
  for name, x in pairs(found) do found[name] = x:detach():to "cpu":cast "f64" end
  return found
end

-- Checks a layer against the CPU in f32. In a sum of n terms, each of the n partial sums is
-- rounded. Their total error is about sqrt(n) roundoffs of the result. Twice that is allowed,
-- because the CPU's result has the same error.
local function check_layer(layer, dtype, row)
  local inputs, upstream = {}, nil
  for i = 1, #layer.shapes do inputs[i] = values_of(layer, i, dtype) end
  local function dy(shape)
    upstream = upstream or lt.randn(shape, {device = "cpu"}):cast(dtype)
    return upstream
  end
  local want = run_layer(layer, inputs, dy, "cpu", "f32")
  local got = run_layer(layer, inputs, dy, device, dtype)
  local single, half = cases.roundoff.f32, dtype ~= "f32" and 2 * cases.roundoff[dtype] or 0.0
  for name, y in pairs(want) do
    local i = math.tointeger(name:match "^grad.(%d)") or 0
    local terms = layer.terms[1 + i] or 1
    local worst = cases.worst(got[name], y, dtype, {
      relative = 8 * single + half, typical = 2 * (64 + math.sqrt(terms)) * single,
      absolute = 0.0})
    if worst ~= worst or worst > row.worst then
      row.worst, row.where = worst, ("%s of x %s"):format(
        name, table.concat(layer.shapes[1], "x"))
    end
  end
  if not cases.same(got, run_layer(layer, inputs, dy, device, dtype)) then
    row.other_bits = "x " .. table.concat(layer.shapes[1], "x")
  end
end

local of_layers = {
  check = check_layer, skips = function() return false end,
  name = function(layer) return "x " .. table.concat(layer.shapes[1], "x") end}

-- ==== Main =======================================================================================

local list, names, kind
if opt.layers then
  list, kind = read_layers(root .. "/tests/cuda/graphs.txt"), of_layers
  names = {"max_pool2d", "avg_pool2d", "batch_norm", "depthwise", "linear", "conv2d"}
else
  list, kind = cases.read(root .. "/tests/ops/cases.txt"), of_cases
  names = cases.ops(root .. "/ops/list.h", list)
end
local wanted = {}
for name in opt.ops:gmatch "[^,]+" do wanted[name] = true end
local waiting = opt.after ~= ""
for _, name in ipairs(names) do
  for dtype in opt.dtypes:gmatch "[^,]+" do
    if not waiting and (opt.ops == "" or wanted[name]) then
      say{begin = name .. " " .. dtype}
      local row = walk(kind, list, name, dtype)
      if row.worst - row.worst ~= 0 then row.error = row.error or "not finite: " .. row.where end
      say(row)
    end
    waiting = waiting and opt.after ~= name .. " " .. dtype
  end
end
say{done = true}
