-- test_ops.lua - calls of ops: inputs and options by position, options by name, and errors.
local lt = require "luatrain"
local T = require "lt_test"

local x = lt.tensor({{1, 2, 3}, {4, 5, 7}})
local image = lt.ones({2, 8, 8, 3})
local weights = lt.ones({4, 3, 3, 3})

T.test("the ways to pass options are equivalent", function()
  local wanted = lt.log_softmax(x, {axis = -1}):totable()
  T.equal(lt.log_softmax(x, -1):totable(), wanted)
  T.equal(x:log_softmax(2):totable(), wanted)
  T.equal(x:log_softmax({}):totable(), wanted)
  T.equal(lt.conv2d(image, weights, nil, 2, 1).shape, {2, 4, 4, 4})
  T.equal(lt.conv2d(image, weights, {stride = 2, pad = 1}).shape, {2, 4, 4, 4})
  T.equal(image:conv2d(weights, nil, 2, {pad = {1, 0}}).shape, {2, 4, 3, 4})
end)

T.test("axes and positions count from 1", function()
  T.equal(x:sum(1):totable(), {5.0, 7.0, 10.0})
  T.equal(x:sum(2):totable(), {6.0, 16.0})
  T.equal(x:sum(-1):totable(), {6.0, 16.0})
  T.equal(x:sum({1, 2}):item(), 22.0)
  T.equal(x:sum():item(), 22.0)
  T.equal(x:argmax(2):totable(), {2, 2})
  T.equal(x:slice(2, 2, 3):totable(), {{2.0, 3.0}, {5.0, 7.0}})
  T.equal(x:slice({axis = 1, first = -1, last = -1}):totable(), {{4.0, 5.0, 7.0}})
  T.equal(lt.cat({x, x}, 1).shape, {4, 3})
  T.equal(lt.cat(x, x, x, {axis = 2}).shape, {2, 9})
  T.fails(function() x:sum(0) end,
          "sum: option 'axis' counts from 1, or from the end if negative, but is 0")
  T.fails(function() x:slice(1, 1, 0) end,
          "slice: option 'last' counts from 1, or from the end if negative, but is 0")
  T.fails(function() x:sum(3) end, "sum: axis 3 is out of range for the 2 axes of x (2x3 f32)")
end)

T.test("cat accepts a list of tensors", function()
  local all = {x, x * 2, x * 3}
  T.equal(lt.cat(all, 1).shape, {6, 3})
  T.equal(lt.cat(all, {axis = 2}):totable(), lt.cat(x, x * 2, x * 3, 2):totable())
  T.equal(lt.cat({x}, 2):totable(), x:totable())
  T.equal(#all, 3)
  local LONE = "cat requires a list of tensors, as in lt.cat({a, b}, 1), but got one tensor "
               .. "(table.unpack(t) before other arguments gives only t[1])"
  T.fails(function() lt.cat(table.unpack(all), {axis = 1}) end, LONE)
  T.fails(function() lt.cat(x, 1) end, LONE)
  T.fails(function() x:cat({x, x}, 1) end, LONE)
  T.fails(function() lt.cat(x) end, LONE)
  T.fails(function() lt.cat({}, 1) end, "cat requires a list of 1 to 64 tensors, but got 0")
  local many = {}
  for i = 1, 65 do many[i] = x end
  T.fails(function() lt.cat(many, 1) end, "cat requires a list of 1 to 64 tensors, but got 65")
  many[65] = nil
  T.equal(lt.cat(many, 1).shape, {128, 3})
  T.fails(function() lt.cat{x, x, axis = 1} end, "cat: the list of tensors has a key 'axis'; "
          .. "options follow the list, as in lt.cat({a, b}, {...})")
  T.fails(function() lt.cat({x, 5}, 1) end, "cat: item 2 of the list must be a tensor, but is 5")
  T.fails(function() lt.cat({x, nil, x}, 1) end,
          "cat: item 2 of the list must be a tensor, but is nil")
  T.fails(function() lt.cat({x, x, [5] = x}, 1) end,
          "cat: item 3 of the list must be a tensor, but is nil")
  for _, key in ipairs{0, -1, 1.5} do
    T.fails(function() lt.cat({x, x, [key] = x}, 1) end,
            ("cat: the list of tensors has a key %s; its items count from 1"):format(key))
  end
  T.fails(function() lt.cat({x, x}) end, "cat: option 'axis' is missing")
  T.fails(function() lt.cat({x, x}, 1, 2) end, "cat: expected at most 1 option, got 2")
  T.fails(function() lt.cat() end, "cat: x must be a tensor, but is nil")
  local w = lt.tensor({1, 2}):requires_grad()
  local y = lt.cat({w, w * 3}, 1) * lt.tensor({1, 1, 2, 2})
  y:sum():backward()
  T.equal(w.grad:totable(), {7.0, 7.0})
end)

T.test("numbers are accepted as tensors", function()
  T.equal(x:gt(3):totable(), {{0, 0, 0}, {1, 1, 1}})
  T.equal(lt.where(x:gt(3), x, 0):totable(), {{0.0, 0.0, 0.0}, {4.0, 5.0, 7.0}})
  T.equal(lt.where(x:gt(3), 0, x):totable(), {{1.0, 2.0, 3.0}, {0.0, 0.0, 0.0}})
  T.equal(lt.sub(1, lt.tensor({1, 2}, {dtype = "f64"})).dtype, "f64")
end)

T.test("invalid options", function()
  T.fails(function() lt.conv2d(image, weights, {strides = 2}) end,
          "conv2d: unknown option 'strides' (did you mean 'stride'?)")
  T.fails(function() lt.conv2d(image, weights, nil, 2, {stride = 1}) end,
          "conv2d: option 'stride' is given twice")
  T.fails(function() lt.conv2d(image, weights, nil, "2") end,
          "conv2d: option 'stride' requires integers, but got '2'")
  T.fails(function() lt.conv2d(image, weights, {stride = 1.5}) end,
          "conv2d: option 'stride' requires integers, but got 1.5")
  T.fails(function() lt.conv2d(image, weights, {stride = {}}) end,
          "conv2d: option 'stride' must have 1 to 8 integers, but has 0")
  T.fails(function() x:relu(1) end, "relu: expected at most 0 options, got 1")
  T.fails(function() x:relu({slope = 1}) end, "relu: unknown option 'slope' (it has no options)")
  T.fails(function() x:dropout({p = "half"}) end,
          "dropout: option 'p' must be a number, but is 'half'")
  T.fails(function() x:sum({keep = 1}) end, "sum: option 'keep' must be true or false, but is 1")
  local o = lt.ones({3})
  T.equal(lt.batch_norm(x, o, o, o, o, {act = "relu6"}):totable(),
          lt.relu6(lt.batch_norm(x, o, o, o, o, {act = "none"})):totable())
  T.fails(function() lt.batch_norm(x, o, o, o, o, {act = "relu5"}) end,
          "batch_norm: option 'act' must be none, relu or relu6, but is 'relu5' "
          .. "(did you mean 'relu'?)")
  T.fails(function() lt.batch_norm(x, o, o, o, o, {act = 1}) end,
          "batch_norm: option 'act' must be none, relu or relu6, but is '1'")
  T.fails(function() x:cast("f3") end, "cast: unknown dtype 'f3' (did you mean 'f32'?)")
  T.fails(function() x:cast(32) end, "cast: dtype must be a name such as 'f32', but is 32")
  T.fails(function() x:reshape() end, "reshape: option 'shape' is missing")
  T.fails(function() x:sum({axis = 1, 2}) end,
          "sum: options in a table must have names, but got key 1")
  T.fails(function() x:sum({[0] = 1, 2}) end,
          "sum: option 'axis' has a key 0; its items count from 1")
  T.fails(function() x:sum({axis = {1, last = 2}}) end,
          "sum: option 'axis' has a key 'last'; its items count from 1")
end)

T.test("invalid inputs", function()
  T.fails(function() lt.conv2d(image) end, "conv2d: w must be a tensor, but is nil")
  T.fails(function() lt.conv2d(image, weights, 2) end,
          "conv2d: b must be a tensor or nil, but is 2; pass options in a table: {name = value}")
  T.fails(function() lt.relu() end, "relu: x must be a tensor, but is nil; call a method with a "
          .. "colon, as in x:relu()")
  T.fails(function() lt.relu("x") end, "relu: x must be a tensor, but is 'x'; call a method with a "
          .. "colon, as in x:relu()")
  T.fails(function() lt.matmul(x, x) end,
          "matmul: y must have 3 rows, one for each column of x, but has 2 (x 2x3 f32, y 2x3 f32)")
  T.fails(function() x:add(lt.ones({2, 2})) end,
          "add: x is 2x3 f32 and y is 2x2 f32, which do not broadcast: "
          .. "axis 1 from the end has 3 and 2")
end)

T.test("help", function()
  T.equal(lt.help "sigmoid", "sigmoid(x)\ny = 1 / (1 + exp(-x)) for each element of x.")
  T.fails(function() lt.help "conv" end, "unknown op 'conv' (did you mean 'conv2d'?)")
  T.fails(function() lt.help(nil) end, "help requires the name of an op, but got nil")
end)

T.test("ops that write their inputs are not part of the API", function()
  for name in ("sgd_step momentum_step lars_step adam_step add_squares batch_norm_merge "
               .. "batch_norm_update dc_grad gap_grad ddc_step ordered_step"):gmatch "%S+" do
    T.equal(rawget(lt, name), nil)
    T.equal(pcall(function() return x[name] end), false)
    T.fails(function() lt.help(name) end, "unknown op '" .. name .. "'")
  end
  T.fails(function() lt.help "sgd_ste" end, "unknown op 'sgd_ste'")
end)

T.finish()
