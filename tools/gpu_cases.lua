-- gpu_cases.lua - the cases of tests/ops/cases.txt for Lua scripts: makes the inputs of a case,
-- runs it, and measures the error of the results. gpu_check_ops.lua uses it.
--
-- The values, their rounding and the tolerances are the same as in tests/ops (cases.h, test_ops.c);
-- the values are the same as in tests/oracle/make.py.
local lt = require "luatrain"

local cases = {}

local ROUNDOFF = {f64 = 2.0 ^ -53, f32 = 2.0 ^ -24, f16 = 2.0 ^ -11, bf16 = 2.0 ^ -8}
local UNDERFLOW = {f64 = 2.0 ^ -1022, f32 = 2.0 ^ -126, f16 = 2.0 ^ -25, bf16 = 2.0 ^ -126}
local LARGE = 4096

cases.roundoff = ROUNDOFF

-- ==== Values =====================================================================================

-- The 64-bit FNV-1a hash.
local function hash(text)
  local h = 0xcbf29ce484222325
  for i = 1, #text do h = (h ~ text:byte(i)) * 0x100000001b3 end
  return h
end

-- Number i of a sequence, in [0, 1): splitmix64 (Steele, Lea and Flood, 2014).
local function uniform(seed, i)
  local z = seed + (i + 1) * 0x9e3779b97f4a7c15
  z = (z ~ z >> 30) * 0xbf58476d1ce4e5b9
  z = (z ~ z >> 27) * 0x94d049bb133111eb
  return ((z ~ z >> 31) >> 11) * 2.0 ^ -53
end

local function normal(seed, i)
  local k = 4 * i
  return (uniform(seed, k) + uniform(seed, k + 1) + uniform(seed, k + 2) + uniform(seed, k + 3) - 2)
         * 1.7320508075688772
end

local KINKS = {-1.0, 0.0, 0.0, 1.0, 6.0}
local SPECIAL = {0 / 0, 1 / 0, -1 / 0, 0.0, -1.0, 2.0}

-- Functions (seed, i, n) that return element i, from 0, of n.
local kinds = {
  normal = normal,
  offset = function(seed, i) return normal(seed, i) + 100 end,
  wide = function(seed, i) return normal(seed, i) * 300 end,
  positive = function(seed, i) return 0.5 + 1.5 * uniform(seed, 4 * i) end,
  away = function(seed, i)
    return (24 * uniform(seed, 4 * i) // 1 - 12) / 4 + 0.03 + 0.19 * uniform(seed, 4 * i + 1)
  end,
  distinct = function(seed, i, n)
    return (i * 7919 % n - n // 2) * 3 / 64 + uniform(seed, 4 * i) / 64
  end,
  kinks = function(seed, i) return KINKS[1 + (5 * uniform(seed, 4 * i)) // 1 | 0] end,
  special = function(_, i) return SPECIAL[1 + i % 6] end,
  mask = function(seed, i) return uniform(seed, 4 * i) < 0.5 and 1 or 0 end,
}

-- Returns the function of a kind of values, and the dtype of the tensor.
local function kind_of(kind)
  local most, narrow = kind:match "^ids(%d+)(.*)$"
  if most then
    most = tonumber(most)
    local function id(seed, i) return (most * uniform(seed, 4 * i)) // 1 | 0 end
    return id, narrow ~= "" and narrow or "i64"
  end
  local value = tonumber(kind)
  if value then return function() return value + 0.0 end, "f64" end
  if not kinds[kind] then error("unknown kind of values '" .. kind .. "'") end
  return kinds[kind], kind == "mask" and "u8" or "f64"
end

local function product(dims)
  local n = 1
  for _, dim in ipairs(dims) do n = n * dim end
  return n
end

-- A tensor of this kind on the CPU.
local function make(dims, kind, seed)
  local value, dtype = kind_of(kind)
  local n, list, where = product(dims), {}, {dtype = dtype, device = "cpu"}
  if n == 0 then return lt.zeros(dims, where) end
  for i = 0, n - 1 do list[i + 1] = value(seed, i, n) end
  if #dims == 0 then return lt.full(dims, list[1], where) end
  return lt.tensor(list, where):reshape(dims)
end

-- ==== The table ==================================================================================

local POSITIONS = {axis = true, axes = true, first = true, last = true}

local function option_of(name, word)
  if word == "true" or word == "false" then return word == "true" end
  local value = math.tointeger(word) or tonumber(word) or word
  if POSITIONS[name] and value >= 0 then value = value + 1 end     -- positions in Lua are from 1
  return value
end

local function options_of(text)
  local options = {}
  for name, words in text:gmatch "(%S-)=(%S+)" do
    local list = {}
    for word in words:gmatch "[^,]+" do list[#list + 1] = option_of(name, word) end
    options[name] = list
    if #list == 1 then options[name] = list[1] end     -- not `and ... or`: it may be false
  end
  return options
end

local function inputs_of(text)
  local inputs = {}
  for name, kind, dims in text:gmatch "(%w[%w_]*)=([^(]+)%(([%d,]*)%)" do
    local input = {name = name, kind = kind, dims = {}}
    for dim in dims:gmatch "%d+" do input.dims[#input.dims + 1] = math.tointeger(dim) end
    inputs[#inputs + 1] = input
  end
  return inputs
end

local function case_of(text, line)
  local fields = {}
  for field in (text .. "|"):gmatch "([^|]*)|" do
    fields[#fields + 1] = field:match "^%s*(.-)%s*$"
  end
  local c = {op = fields[1], line = line, options = options_of(fields[3]),
             inputs = inputs_of(fields[2]), notes = (fields[5] or ""):match "^[^:]*",
             key = ("%016x"):format(hash(table.concat(fields, " | ", 1, 4)))}
  for _, input in ipairs(c.inputs) do
    c.large = c.large or product(input.dims) > LARGE
  end
  return c
end

-- All cases in a file, in its order.
function cases.read(path)
  local list, line = {}, 0
  for text in io.lines(path) do
    line = line + 1
    if text:find "^[^#]" then list[#list + 1] = case_of(text, line) end
  end
  return list
end

-- What only the embedded files see, such as the ops that write their inputs.
local function find_core()
  for i = 1, math.huge do
    local name, core = debug.getupvalue(lt.load, i)
    if name == "core" then return core end
    assert(name, "lt.load does not refer to the core")
  end
end

local core = find_core()
local function op_of(name) return core.in_place_ops[name] or lt[name] end

-- Ops that call cuDNN or cuBLASLt, which take long to load, above all under compute-sanitizer.
local OF_LIBRARIES = {matmul = true, linear = true, conv2d = true}

-- The names of ops in ops/list.h, in its order, but first those that need no library. An op without
-- a case, a case of an unknown op, and an op that luatrain lacks are errors.
function cases.ops(path, list)
  local file <close> = assert(io.open(path, "r"))
  local names, last, known = {}, {}, {}
  for _, c in ipairs(list) do known[c.op] = true end
  for name in file:read "a":match "#define LT_OP_LIST.*#endif":gmatch "X%((%l[%w_]*)%)" do
    if not known[name] then error(name .. " has no case in tests/ops/cases.txt", 0) end
    table.insert(OF_LIBRARIES[name] and last or names, name)
    known[name] = nil
    op_of(name)
  end
  table.move(last, 1, #last, #names + 1, names)
  local odd = next(known)
  if odd then error("tests/ops/cases.txt has cases of " .. odd .. ", which is not an op", 0) end
  return names
end

-- ==== A run ======================================================================================

local function is_float(x) return ROUNDOFF[x.dtype] ~= nil end

local function rounded(x, dtype)
  return is_float(x) and x:cast(dtype):cast "f64" or x
end

local synchronizer = lt.nn.linear{1, 1}   -- its eval() updates running statistics

-- Whether the backward of the op that made y reads an output: a saved float that is not an input.
local function reads_output(y, inputs)
  local known, i = {}, 1
  for _, x in ipairs(inputs) do known[core.memory_of(x)] = true end
  local saved = core.saved(y, i)
  while saved and (known[core.memory_of(saved)] or not is_float(saved)) do
    i = i + 1
    saved = core.saved(y, i)
  end
  return saved ~= nil
end

-- Runs forward with the leaves as inputs, then backward with the upstream gradients dy times
-- factor. Returns the outputs. Sets c.reads_output.
local function pass(c, leaves, dy, factor)
  local args = c.op == "cat" and {leaves} or table.move(leaves, 1, #leaves, 1, {})
  args[#args + 1] = c.options
  local outputs = {op_of(c.op)(table.unpack(args))}
  for k, y in ipairs(outputs) do
    if dy[k] and y.on_tape then
      c.reads_output = reads_output(y, leaves)
      y:backward((dy[k] * factor):cast(y.dtype):to(y.device))
    end
  end
  synchronizer:zero_grad()                -- ends the step
  synchronizer:eval()                     -- synchronizes running statistics
  return outputs
end

-- Runs a case on a device. Returns its results by name, as f64 on the CPU: out.K, the outputs from
-- 0; grad.NAME, the gradients; after.NAME, the inputs afterwards. The second result has their
-- dtypes. given: {inputs = a list, dy = upstream gradients by output, from 1, empty for no
-- gradients}. With twice, a second backward accumulates into the gradients, which are then divided.
function cases.run(c, given, dtype, device, twice)
  local leaves, found, dtypes = {}, {}, {}
  local function keep(name, x, factor)
    dtypes[name] = x.dtype
    x = x:detach():to "cpu"
    if x.dtype ~= "f64" then x = x:cast "f64" end
    found[name] = factor and x / factor or x * 1     -- a copy: x may change later
  end
  for i, x in ipairs(given.inputs) do
    leaves[i] = (is_float(x) and (x * 1):cast(dtype) or x):to(device)
    if next(given.dy) and is_float(x) then leaves[i]:requires_grad() end
  end
  for k, y in ipairs(pass(c, leaves, given.dy, 1)) do keep("out." .. k - 1, y) end
  for i, x in ipairs(leaves) do keep("after." .. c.inputs[i].name, x) end
  if twice and next(given.dy) then pass(c, leaves, given.dy, 2) end
  for i, x in ipairs(leaves) do
    if x.grad then keep("grad." .. c.inputs[i].name, x.grad, twice and 3 or 1) end
  end
  return found, dtypes
end

-- The inputs of a case in a dtype, for cases.run: its values rounded to dtype and, if it has
-- gradients, upstream gradients of its float outputs.
function cases.given(c, dtype)
  local given = {inputs = {}, dy = {}}
  local floats = false
  c.values = c.values or {}
  for i, input in ipairs(c.inputs) do
    c.values[i] = c.values[i]
      or make(input.dims, input.kind, hash(c.key .. " " .. input.name)):keep()
    given.inputs[i] = rounded(c.values[i], dtype)
    floats = floats or is_float(c.values[i])
  end
  if floats and not c.notes:find "forward" then
    local found, dtypes = cases.run(c, given, "f64", "cpu")
    for k = 1, 8 do
      local y, name = found["out." .. k - 1], "out." .. k - 1
      if y and ROUNDOFF[dtypes[name]] then
        given.dy[k] = rounded(make(y.shape, "normal", hash(("%s dy %d"):format(c.key, k - 1))),
                              dtype)
      end
    end
  end
  return given
end

-- ==== Errors =====================================================================================

local function root_mean_square(x)
  if x:count() == 0 then return 0.0 end
  local finite = lt.where((x - x):eq(0), x, 0.0)
  return math.sqrt((finite * finite):mean():item())
end

-- A copy of x with each element moved up or down by one f32 roundoff.
local function shaken(x)
  if not is_float(x) then return x end
  local sign = lt.randn(x.shape, {dtype = "f64", device = "cpu"}):gt(0.0):cast "f64" * 2.0 - 1.0
  return x * (sign * 2.0 ^ -24 + 1.0)
end

-- How far each element of the results moves when an input is perturbed by shaken(): the larger of
-- two tries, summed over all inputs. This measures the conditioning of the case: how much it
-- amplifies errors that no f32 kernel can avoid.
function cases.wobble(c, given, truth)
  local total = {}
  for _, list in pairs{inputs = given.inputs, dy = given.dy} do
    for i, x in pairs(list) do
      local largest = {}
      for _ = 1, is_float(x) and 2 or 0 do
        list[i] = shaken(x)
        for name, y in pairs((cases.run(c, given, "f64", "cpu"))) do
          local way = (y - truth[name]):abs()
          way = lt.where(way:eq(way), way, 0.0)
          local before = largest[name]
          largest[name] = before and lt.where(way:gt(before), way, before) or way
        end
      end
      list[i] = x
      for name, way in pairs(largest) do total[name] = total[name] and total[name] + way or way end
    end
  end
  return total
end

-- Returns the largest error of got, relative to the margin: at most 1 if got is right; NaN if only
-- one of got and want is NaN somewhere. dtype: the dtype in which got was stored. The allowed error
-- of an element w of want is margin.relative * |w| + margin.typical * (root mean square of want)
-- + margin.absolute + margin.spread, where spread is a tensor or nil.
function cases.worst(got, want, dtype, margin)
  if #got.shape ~= #want.shape or got:count() ~= want:count() then return 1 / 0 end
  if got:count() == 0 then return 0.0 end
  local least = margin.absolute + margin.typical * root_mean_square(want)
                + (UNDERFLOW[dtype] or 0.0)
  local allowed = want:abs() * margin.relative + least
  if margin.spread then allowed = allowed + margin.spread end
  local stored = rounded(want, ROUNDOFF[dtype] and dtype or "f64")
  local same = lt.where(got:ne(got), want:ne(want), got:eq(stored))
  return lt.where(same, 0.0, (got - want):abs() / allowed):max():item()
end

-- The margin of the result `name` of a case, as in test_ops.c.
function cases.margin(c, name, dtype, given, wobble)
  local single = ROUNDOFF.f32
  local half = (dtype == "f16" or dtype == "bf16") and 2 * ROUNDOFF[dtype] or 0.0
  local absolute = 0.0
  if not ROUNDOFF[dtype] then return {relative = 0.0, typical = 0.0, absolute = 0.0} end
  if c.reads_output and name:find "^grad" then     -- an output, which is rounded to dtype
    absolute = 8 * ROUNDOFF[dtype] * root_mean_square(given.dy[1])
  end
  return {relative = 8 * single + half, typical = (c.op == "conv2d" and 64 or 2) * single,
          absolute = absolute, spread = wobble[name] and wobble[name] * 32.0}
end

-- Whether the results of two runs are equal in each element. NaN equals NaN, and -0 equals 0.
function cases.same(a, b)
  for name, x in pairs(a) do
    local y = b[name]
    if not y then return false end
    if x:count() > 0 and lt.where(x:ne(x), y:ne(y), x:eq(y)):min():item() == 0 then return false end
  end
  return true
end

return cases
