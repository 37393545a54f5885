-- test_tensor.lua - creating tensors, elements, operators and tostring.
local lt = require "luatrain"
local T = require "lt_test"

T.test("functions that create tensors", function()
  T.equal(lt.zeros({2, 3}).shape, {2, 3})
  T.equal(lt.zeros({2}).dtype, "f32")
  T.equal(lt.ones({2}, {dtype = "f64"}):totable(), {1.0, 1.0})
  T.equal(lt.full({2}, 7, {dtype = "i64"}):totable(), {7, 7})
  T.equal(lt.arange(4):totable(), {0.0, 1.0, 2.0, 3.0})
  T.equal(lt.arange(1, 4, {dtype = "i32"}):totable(), {1, 2, 3})
  T.equal(lt.arange(5, 0, -2):totable(), {5.0, 3.0, 1.0})
  T.equal(lt.arange(0):count(), 0)
  T.equal(lt.tensor({{1, 2}, {3, 4}}):totable(), {{1.0, 2.0}, {3.0, 4.0}})
  T.equal(lt.tensor(2.5):item(), 2.5)
  T.equal(#lt.tensor(2.5).shape, 0)
  T.equal(lt.tensor({}).shape, {0})
  T.equal(lt.tensor({2 ^ 53 | 0, -1}, {dtype = "i64", device = "cpu"}):totable(), {2 ^ 53 | 0, -1})
end)

T.test("invalid arguments of functions that create tensors", function()
  T.fails(function() lt.zeros(3) end,
          "lt.zeros: the shape must be a table such as {2, 3}, but is 3")
  T.fails(function() lt.zeros({2, -1}) end,
          "lt.zeros: axis 2 of the shape must be a count, but is -1")
  T.fails(function() lt.zeros({2, "x"}) end,
          "lt.zeros: axis 2 of the shape must be a count, but is 'x'")
  T.fails(function() lt.zeros({1, 1, 1, 1, 1, 1, 1, 1, 1}) end,
          "lt.zeros: a tensor has at most 8 axes, but the shape has 9")
  T.fails(function() lt.zeros({2}, {dtyp = "f64"}) end,
          "lt.zeros: unknown option 'dtyp' (did you mean 'dtype'?)")
  T.fails(function() lt.zeros({2}, {dtype = "f65"}) end,
          "lt.zeros: unknown dtype 'f65' (did you mean 'f64'?)")
  T.fails(function() lt.zeros({2}, "f64") end,
          "lt.zeros: options must be a table such as {dtype = 'f64'}, but got 'f64'")
  T.fails(function() lt.zeros({2}, {device = "cuda"}) end,
          "lt.zeros: device 'cuda' is not available; this context has 'cpu'")
  T.fails(function() lt.full({2}, 0.5, {dtype = "i64"}) end, "lt.full: 0.5 does not fit into i64")
  T.fails(function() lt.randn({2}, {dtype = "i64"}) end,
          "lt.randn: dtype must be a float dtype, but is i64")
  T.fails(function() lt.zeros{2, dtype = "f64"} end, "lt.zeros: the shape has a key 'dtype'; "
          .. "its items count from 1, and options are the next argument")
  T.fails(function() lt.full({[0] = 1, 2}, 7) end, "lt.full: the shape has a key 0; "
          .. "its items count from 1, and options are the next argument")
  T.fails(function() lt.nn.parameter{2, init = 0} end, "nn.parameter: the shape has a key 'init'; "
          .. "its items count from 1, and options are the next argument")
  T.fails(function() lt.tensor{1, 2, dtype = "f64"} end, "lt.tensor: the table has a key 'dtype'; "
          .. "its items count from 1, and options are the next argument")
  T.fails(function() lt.tensor{{1, 2}, {3, 4, [0] = 5}} end, "lt.tensor: the table has a key 0; "
          .. "its items count from 1, and options are the next argument")
  T.fails(function() lt.tensor{1, 2, [4] = 5} end, "lt.tensor: the table has a key 4; "
          .. "its items count from 1, and options are the next argument")
  T.fails(function() lt.tensor({{1, 2}, {3}}) end,
          "lt.tensor: ragged table: at depth 2, expected 2 values, got 1")
  T.fails(function() lt.tensor({{1, 2}, 3}) end,
          "lt.tensor: ragged table: at depth 2, expected 2 values, got 3")
  T.fails(function() lt.tensor({1, "a"}) end, "lt.tensor: the value must be a number, but is 'a'")
  T.fails(function() lt.tensor({1, 300}, {dtype = "u8"}) end, "lt.tensor: 300 does not fit into u8")
  T.fails(function() lt.tensor("a") end, "lt.tensor: the value must be a number, but is 'a'")
  T.fails(function() lt.arange(0, 1e300) end,
          "lt.arange: too many elements: 1e+300, in steps of 1 from 0 to 1e+300")
  T.fails(function() return lt.conv3d end, "luatrain has no 'conv3d' (did you mean 'conv2d'?)")
end)

local MOST, LEAST, ODD = math.maxinteger, math.mininteger, (1 << 53) + 1
local I64 = {dtype = "i64"}

T.test("i64 integers are exact", function()
  local list = {MOST, MOST - 1, LEAST, LEAST + 1, ODD, -ODD}
  T.equal(lt.tensor(list, I64):totable(), list)
  for _, n in ipairs(list) do
    T.equal(lt.tensor(n, I64):item(), n)
    T.equal(lt.full({3, 5}, n, I64):reshape(15):totable()[15], n)
    T.equal(lt.zeros({5}, I64):fill(n):totable(), {n, n, n, n, n})
    local x = lt.zeros({2}, I64)
    x:set(2, n)
    T.equal(x:totable(), {0, n})
    T.equal((lt.zeros({2}, I64) + n):totable(), {n, n})
    T.equal(lt.eq(lt.tensor({n, n ~ 1}, I64), n):totable(), {1, 0})
  end
  T.equal(lt.full({0}, ODD, I64):count(), 0)
  T.equal(lt.tensor({2.0 ^ 62, -2.0 ^ 63}, I64):totable(), {1 << 62, LEAST})
end)

T.test("lt.arange of integers is exact", function()
  T.equal(lt.arange(ODD, ODD + 3, I64):totable(), {ODD, ODD + 1, ODD + 2})
  T.equal(lt.arange(MOST, MOST - 3, -1, I64):totable(), {MOST, MOST - 1, MOST - 2})
  T.equal(lt.arange(MOST - 1, MOST, 5, I64):totable(), {MOST - 1})
  T.equal(lt.arange(LEAST, MOST, 1 << 62, I64):totable(), {LEAST, -(1 << 62), 0, 1 << 62})
  T.equal(lt.arange(MOST, LEAST, LEAST, I64):totable(), {MOST, -1})
  T.equal(lt.arange(3, 3):count() + lt.arange(3, -3):count(), 0)
  T.fails(function() lt.arange(LEAST, MOST, 1, I64) end,
          "lt.arange: too many elements: 1.84467e+19, in steps of 1 from -9.22337e+18 to "
          .. "9.22337e+18")
  T.fails(function() lt.arange(0, 10, 0) end,
          "lt.arange: too many elements: inf, in steps of 0 from 0 to 10")
  T.fails(function() lt.arange(0, 10, 0 / 0) end,
          "lt.arange: too many elements: nan, in steps of nan from 0 to 10")
  T.fails(function() lt.arange(250, 260, {dtype = "u8"}) end,
          "lt.arange: 256 does not fit into u8")
end)

T.test("numbers that do not fit into the dtype are errors", function()
  T.fails(function() lt.tensor({2.0 ^ 63}, I64) end,
          "lt.tensor: 9.2233720368548e+18 does not fit into i64")
  T.fails(function() lt.full({2}, 1e300, I64) end, "lt.full: 1e+300 does not fit into i64")
  T.fails(function() lt.full({2}, 0 / 0, {dtype = "i32"}) end,
          "lt.full: nan does not fit into i32")
  T.fails(function() lt.zeros({2}, I64):fill(1 / 0) end, "fill: inf does not fit into i64")
  T.fails(function() lt.zeros({2}, {dtype = "i32"}):fill(1 << 31) end,
          "fill: 2147483648 does not fit into i32")
  T.fails(function() lt.zeros({2}, {dtype = "u8"}):set(1, -1) end, "set: -1 does not fit into u8")
  T.fails(function() return lt.zeros({2}, I64) + 2.0 ^ 63 end,
          "add: 9.2233720368548e+18 does not fit into the other tensor's i64; cast that tensor, "
          .. "e.g. x:cast('f32')")
  T.fails(function() lt.pad(lt.zeros({2}, {dtype = "u8"}), 1, 1, 300) end,
          "pad: value must fit into u8, but is 300")
  T.fails(function() lt.pad(lt.zeros({2}, I64), 1, 1, 0.5) end,
          "pad: value must fit into i64, but is 0.5")
  T.fails(function() lt.zeros({2}, I64):clamp{max = ODD} end,
          "clamp: option 'max' is a double, which cannot hold 9007199254740993 exactly")
  T.equal(lt.tensor({MOST, 1}, I64):clamp{max = 1 << 60}:totable(), {1 << 60, 1})
end)

T.test("random numbers depend on the seed and the number of draws", function()
  lt.seed(5)
  local a, b = lt.randn({4}), lt.rand({4})
  lt.seed(5)
  T.equal(lt.randn({4}):totable(), a:totable())
  T.equal(lt.rand({4}):totable(), b:totable())
  T.equal(lt.seed(), 5)
  for _, v in ipairs(lt.rand({100}):totable()) do assert(v >= 0 and v < 1) end
  T.fails(function() lt.seed(-1) end, "lt.seed requires a non-negative integer, but got -1")
end)

T.test("nan is printed without a sign", function()
  local negative = lt.zeros{1}:log() - lt.zeros{1}:log()              -- on x86
  T.equal(("%g %s %g"):format(negative:item(), negative:get(1), negative:totable()[1]),
          "nan nan nan")
  local net = lt.nn.sequential{lt.nn.linear{1, 1}}
  T.fails(function() lt.optim.sgd(net, {lr = 0 / 0}) end,
          "optim.sgd: 'lr' must be a non-negative number, but is nan")
  T.fails(function() lt.optim.sgd(net, {lr = "x-nan"}) end,
          "optim.sgd: 'lr' must be a non-negative number, but is 'x-nan'")
end)

T.test("elements", function()
  local x = lt.tensor({{1, 2, 3}, {4, 5, 6}})
  T.equal(x:get(2, 3), 6.0)
  x:set(1, 2, 20)
  T.equal(x:totable(), {{1.0, 20.0, 3.0}, {4.0, 5.0, 6.0}})
  T.equal(x:dim(1), 2)
  T.equal(x:dim(-1), 3)
  T.equal(#x, 2)
  T.equal(x:count(), 6)
  T.equal(lt.zeros({2}):fill(3):totable(), {3.0, 3.0})
  T.equal(lt.zeros({2}, {dtype = "i64"}):copy(lt.tensor({1, 2})):totable(), {1, 2})
  T.equal(lt.tensor(3, {dtype = "u8"}):item(), 3)
  T.fails(function() x:get(3, 1) end, "get: index 1 must be 1 to 2, but is 3 (2x3 f32)")
  T.fails(function() x:get(1) end, "get requires 2 indices, but got 1 (2x3 f32)")
  T.fails(function() x:item() end, "item requires a tensor of one element, but got 2x3 f32")
  T.fails(function() x:dim(0) end,
          "dim requires an axis from 1 to 2, or from the end if negative, but got 0 (2x3 f32)")
  T.fails(function() return #lt.tensor(1) end,
          "# requires a tensor with axes, but this one has none")
  T.fails(function() lt.zeros({1}, {dtype = "i64"}):set(1, 0.5) end,
          "set: 0.5 does not fit into i64")
  T.fails(function() x:copy(lt.zeros({5})) end,
          "copy requires the same number of elements: 5 f32 and 2x3 f32 differ")
end)

T.test("names", function()
  local x = lt.zeros({2})
  T.fails(function() return x.shap end,
          "tensor: unknown method or field 'shap' (did you mean 'shape'?)")
  T.fails(function() x:softmux() end,
          "tensor: unknown method or field 'softmux' (did you mean 'softmax'?)")
  T.fails(function() return x[1] end, "tensor: x[1] is not an element; use x:get(...) and "
          .. "x:set(..., value)")
  T.equal(x.device, "cpu")
end)

T.test("operators", function()
  local x = lt.tensor({1, 2})
  T.equal((x + x):totable(), {2.0, 4.0})
  T.equal((x - 1):totable(), {0.0, 1.0})
  T.equal((1 - x):totable(), {0.0, -1.0})
  T.equal((2 * x / 4):totable(), {0.5, 1.0})
  T.equal((x ^ 2):totable(), {1.0, 4.0})
  T.equal((-x):totable(), {-1.0, -2.0})
  local i = lt.tensor({1, 2}, {dtype = "i64"})
  T.equal((i + 1):totable(), {2, 3})
  T.equal((i + 1).dtype, "i64")
  T.equal(lt.add(x, 1):totable(), x:add(1):totable())
  assert(x == x and x ~= lt.tensor({1, 2}), "== compares identity")
  T.fails(function() return i + 0.5 end,
          "add: 0.5 does not fit into the other tensor's i64; cast that tensor, e.g. x:cast('f32')")
  T.fails(function() return x + "a" end, "add: y must be a tensor, but is 'a'")
  T.fails(function() return x * nil end, "mul: y must be a tensor, but is nil")
  T.fails(function() return {} - x end, "sub: x must be a tensor, but is a table")
end)

T.test("division", function()
  local i, j = lt.tensor({-7, 7, -7, 7}, I64), lt.tensor({2, 2, -2, -2}, I64)
  local u = lt.tensor({0, 51, 255}, {dtype = "u8"})
  T.equal((i / j).dtype, "f32")
  T.equal((i / j):totable(), {-3.5, 3.5, 3.5, -3.5})
  T.equal((u / 51):totable(), {0.0, 1.0, 5.0})
  T.equal((u / 510):totable(), {0.0, lt.tensor(0.1):item(), 0.5})
  T.equal((u / 2.5):totable(), {0.0, lt.tensor(20.4):item(), 102.0})
  T.equal((510 / u):totable(), {math.huge, 10.0, 2.0})
  T.equal((u / lt.tensor({2, 2, 2}, I64)):totable(), {0.0, 25.5, 127.5})
  T.equal((u / lt.tensor({2, 2, 2}, {dtype = "f64"})).dtype, "f64")
  T.equal((lt.tensor{1, 2, 2, 2}:eq(2):sum() / 4):item(), 0.75)
  T.equal((i // j).dtype, "i64")
  T.equal((i // j):totable(), {-4, 3, 3, -4})
  T.equal((i // 2):totable(), {-4, 3, -4, 3})
  T.equal((7 // j):totable(), {3, 3, -4, -4})
  T.equal((i // 0):totable(), {0, 0, 0, 0})
  T.equal((u // 7):totable(), {0, 7, 36})
  T.equal((lt.tensor(LEAST, I64) // -1):item(), LEAST)
  T.equal((lt.tensor{-7.5, 7.5, 1} // 2):totable(), {-4.0, 3.0, 0.0})
  T.equal((7.5 // lt.tensor{2, -2}):totable(), {3.0, -4.0})
  T.fails(function() return i // 2.5 end,
          "floor_divide: 2.5 does not fit into the other tensor's i64; cast that tensor, e.g. " ..
          "x:cast('f32')")
  T.fails(function() return i // lt.tensor{1} end,
          "floor_divide: x is i64, y is f32; cast one of them, e.g. y to i64")
end)

T.test("tostring", function()
  T.equal(tostring(lt.tensor({{1, 2}, {3, 4}})), "{{1, 2},\n {3, 4}}  2x2 f32")
  T.equal(tostring(lt.tensor({1.5, -20})), "{  1.5000, -20.0000}  2 f32")
  T.equal(tostring(lt.tensor({1, 2}, {dtype = "i64"})), "{1, 2}  2 i64")
  T.equal(tostring(lt.tensor({MOST, LEAST, ODD}, I64)),
          "{ 9223372036854775807, -9223372036854775808,     9007199254740993}  3 i64")
  T.equal(tostring(lt.tensor(3.5)), "3.5000  scalar f32")
  T.equal(tostring(lt.tensor({1e-9, 1})), "{1.0000e-09, 1.0000e+00}  2 f32")
  T.equal(tostring(lt.tensor({0 / 0, 1 / 0})), "{nan, inf}  2 f32")
  T.equal(tostring(lt.arange(13)), "{ 0,  1,  2,  3,  4, ...,  8,  9, 10, 11, 12}  13 f32")
  T.equal(tostring(lt.zeros({2, 1, 2})), "{{{0, 0}},\n {{0, 0}}}  2x1x2 f32")
  T.equal(tostring(lt.zeros({0, 3})), "{}  0x3 f32")
  T.equal(tostring(lt.nn.parameter({2})), "parameter 2 f32 (no memory yet)")
end)

T.test("a closed tensor cannot be used", function()
  local x = lt.zeros({2})
  do local _ <close> = x end
  T.fails(function() return x.shape end, "this tensor was closed")
  T.fails(function() return x + 1 end, "this tensor was closed")
end)

T.finish()
