-- test_mistakes.lua - mistakes of a new user: each script raises exactly this message, with its own
-- line. Mistakes that are found to be silent, or to have a message that does not help, go here.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local out = T.folder()
local net = nn.sequential{nn.flatten(), nn.linear{12, 3}}
local set = lt.data.set{images = lt.ones{6, 2, 2, 3}, labels = lt.zeros({6}, {dtype = "i64"}),
                        classes = 3}
local env = setmetatable({
  lt = lt, nn = nn, net = net, set = set, sgd = lt.optim.sgd(net, {lr = 0.1}),
  x = lt.ones{4, 3}, image = lt.ones{2, 2, 2, 3}, ids = lt.tensor({0, 1, 5}, {dtype = "i64"}),
}, {__index = _G})

-- The settings of a run, with changes.
function env.s(changes)
  local s = {net = net, optim = env.sgd, train = set, epochs = 1, batch = 3, out = out}
  for key, value in pairs(changes or {}) do s[key] = value end
  return s
end

local function colon(name)             -- the method, after the line if that is not 1
  return name .. " must be called with a colon: " .. name:gsub("^%d+: ", "") .. "(...)"
end
local METHOD = "; call a method with a colon, as in x:"

-- A script, and its message. The line is 1 unless the message says another.
local rows = {
  -- a dot instead of a colon
  {"net.eval()", colon "net:eval"},
  {"net.load('w.safetensors')", colon "net:load"},
  {"net.freeze(false)", colon "net:freeze"},
  {"net.parameters()", colon "net:parameters"},
  {"sgd.step()", colon "optim:step"},
  {"sgd.zero_grad()", colon "optim:zero_grad"},
  {"sgd.step(net)", colon "optim:step"},
  {"set.batches{batch = 2}", colon "set:batches"},
  {"set.sized(32)", colon "set:sized"},
  {"local scaler <close> = lt.amp.scaler{}\nscaler.state()", colon "2: scaler:state"},
  {"local run <close> = lt.run(s())\nrun.report{}", colon "2: run:report"},
  {"local run <close> = lt.run(s())\nrun.evaluate(set)", colon "2: run:evaluate"},
  {"local run <close> = lt.run(s())\nrun.mixup(x, x)", colon "2: run:mixup"},
  {"x.item()", colon "x:item"},
  {"x.backward()", colon "x:backward"},
  {"x.totable()", colon "x:totable"},
  {"x.detach()", colon "x:detach"},
  {"x.to('cpu')", colon "x:to"},
  {"x.get(1, 1)", colon "x:get"},
  {"x.relu()", "relu: x must be a tensor, but is nil" .. METHOD .. "relu()"},
  {"x.reshape{3, 4}", "reshape: x must be a tensor, but is a table" .. METHOD .. "reshape()"},
  {"x.sum(1)", "sum: x must be a tensor, but is 1" .. METHOD .. "sum()"},
  {"x.cast 'f64'", "cast: x must be a tensor, but is 'f64'" .. METHOD .. "cast()"},
  -- wrong inputs of a net
  {"net{image}", "net.1 flatten: x must be a tensor, but is a table"},
  {"net(nil)", "net.1 flatten: x must be a tensor, but is nil"},
  {"nn.linear{3, 2}{x}", "net linear: x must be a tensor, but is a table"},
  {"net(x)", "net.2 linear: w has 12 input features, but x has 3 (x 4x3 f32, w 3x12 f32)"},
  {"nn.conv2d{3, 8, 3}(lt.ones{2, 3, 8, 8})",
   "net conv2d: w has 3 input channels, but x has 8 (x 2x3x8x8 f32, w 8x3x3x3 f32)"},
  -- names of PyTorch
  {"x:size(1)", "tensor: unknown method or field 'size' (use x:dim(axis) or x.shape)"},
  {"x:view(12)", "tensor: unknown method or field 'view' (use x:reshape{...})"},
  {"x:cuda()", "tensor: unknown method or field 'cuda' (use luatrain --device cuda)"},
  {"x:softmx(1)", "tensor: unknown method or field 'softmx' (did you mean 'softmax'?)"},
  {"nn.Relu()", "nn has no 'Relu' (did you mean 'relu'?)"},
  {"nn.MaxPool2d(2)", "nn has no 'MaxPool2d' (did you mean 'max_pool2d'?)"},
  {"nn.BatchNorm2d(2)", "nn has no 'BatchNorm2d' (use nn.batch_norm)"},
  {"nn.CrossEntropyLoss()", "nn has no 'CrossEntropyLoss' (use lt.cross_entropy)"},
  {"lt.optim.SGD(net)", "optim has no 'SGD' (did you mean 'sgd'?)"},
  {"lt.stack{x, x}", "luatrain has no 'stack' (use lt.cat)"},
  {"net:to 'cuda'", "net:to requires a dtype, such as 'f64', but got 'cuda'; a net is on the "
                    .. "device of the program: luatrain --device cuda"},
  {"x:to 'gpu'", "to: device 'gpu' is not available; this context has 'cpu'"},
  -- elements and fields
  {"return x[1]", "tensor: x[1] is not an element; use x:get(...) and x:set(..., value)"},
  {"x[1] = 2", "tensor: cannot assign to x[1]; use x:set(..., value)"},
  {"x.requires_grad = true", "tensor: the field 'requires_grad' cannot be set; use "
                             .. "x:requires_grad(true)"},
  {"x.grad = nil", "tensor: the field 'grad' cannot be set; use x:zero_grad()"},
  {"x.name = 'x'", "tensor: the field 'name' cannot be set"},
  -- arguments of ops
  {"lt.cat(x, x)", "cat: option 'axis' is missing; pass the tensors in a list, as in "
                   .. "lt.cat({a, b}, 1)"},
  {"x:reshape(4, 12)", "reshape: expected at most 1 option, got 2; write a list: {4, 12}"},
  {"x:permute(2, 1)", "permute: expected at most 1 option, got 2; write a list: {2, 1}"},
  {"x:argmax(1, 2)", "argmax: option 'keep' must be true or false, but is 2"},
  {"x:sum(0)", "sum: option 'axis' counts from 1, or from the end if negative, but is 0"},
  {"x:sum{dim = 1}", "sum: unknown option 'dim' (it has axis, keep)"},
  {"lt.zeros(2, 3)", "lt.zeros: the shape must be a table such as {2, 3}, but is 2"},
  {"x:cast 'float32'", "cast: unknown dtype 'float32' (known: f32, f64, f16, bf16, i64, i32, u8)"},
  {"return x + lt.ones({4, 3}, {dtype = 'f64'})",
   "add: x is f32, y is f64; cast one of them, e.g. y to f32"},
  {"lt.cross_entropy(x, lt.ones{4})", "cross_entropy: labels must have an integer dtype (i64, i32 "
                                      .. "or u8), but is f32; cast it, e.g. to i64"},
  {"lt.cross_entropy(lt.ones{3, 3}, ids)",
   "cross_entropy: label number 3 is 5, but x has 3 classes (labels start at 0)"},
  {"lt.embedding(x, ids)", "embedding: id number 3 is 5, but w has 4 rows (ids start at 0)"},
  -- training
  {"x:sum():backward()", "backward: the loss was not computed from anything that requires a "
                         .. "gradient"},
  {"sgd:step()", "an optimizer step has no gradients: no backward has run since the last step; "
                 .. "call backward on the loss first"},
  {"lt.run(s{metrics = {}})", "lt.run: unknown key 'metrics': lt.run{net, optim, train, epochs, "
     .. "batch; schedule?, loss?, augment?, mixup=0.0, sizes?, target?, workers?, out?, resume?, "
     .. "save_every?, max_steps?, amp?, scaler?}"},
  {"lt.fit(s{test = set, metrics = {'accuracy'}})",
   "lt.fit: 'metrics' must be a list such as {lt.metrics.top1}, but item 1 is 'accuracy'"},
  {"lt.fit(s{test = set, accumulate = 0})",
   "lt.fit: 'accumulate' must be a positive integer, but is 0"},
  {"lt.fit(s{test = set, batch = 0})", "lt.fit: 'batch' must be a positive integer, but is 0"},
  {"lt.fit(s{test = set, lr = 0.1})", "lt.fit: unknown key 'lr': " .. "lt.fit{net, train, test, "
     .. "optim, epochs, batch; loss?, label_smoothing=0.0, metrics?, schedule?, augment?, "
     .. "mixup=0.0, sizes?, target?, accumulate=1, eval_batch?, workers?, out?, resume?, "
     .. "save_every?, max_steps?, amp?, scaler?}"},
  {"lt.run(s{sizes = {224}})", "lt.run: 'sizes' must be a list of tables, but item 1 is 224"},
  {"lt.optim.sgd(net, {lr = '0.1'})",
   "optim.sgd: 'lr' must be a non-negative number, but is '0.1'"},
  {"sgd:load{steps = 5}", "optim: steps must be a tensor, but is 5"},
  {"sgd:set()", "optim:set requires the name of a setting, but got nil"},
  {"lt.on_root()", "lt.on_root requires a function, but got nil"},
  {"lt.data.set{images = image, labels = ids:slice(1, 1, 2), names = {'a', 2}}",
   "data.set: 'names' must be a list of strings, but item 2 is 2"},
}

T.test("a message has the script's line", function()
  local wrong = {}
  for _, row in ipairs(rows) do
    local script, message = table.unpack(row)
    local ok, why = pcall(assert(load(script, "=t.lua", "t", env)))
    local wanted = "t.lua:" .. (message:find "^%d+: " and message or "1: " .. message)
    if ok or why ~= wanted then
      wrong[#wrong + 1] = ("%s\n  expected %s\n  got      %s"):format(script, wanted, ok or why)
    end
  end
  T.equal(table.concat(wrong, "\n"), "")
end)

-- Lua itself raises these; the program adds to the message.
T.test("a message of Lua has the script's line, and a hint", function()
  for script, message in pairs{
    ["net:cuda()"] = "1: attempt to call a nil value (method 'cuda'); use luatrain --device cuda",
    ["net:half()"] = "1: attempt to call a nil value (method 'half'); use lt.run's amp = 'fp16', "
                     .. "or x:cast 'f16'",
    ["net:forward(x)"] = "1: attempt to call a nil value (method 'forward'); use net(x)",
    ["net:save 'w'"] = "1: attempt to call a nil value (method 'save'); use lt.save(path, net)",
    ["net:unfreeze()"] = "1: attempt to call a nil value (method 'unfreeze'); use "
                         .. "net:freeze(false)",
    ["net:requires_grad_()"] = "1: attempt to call a nil value (method 'requires_grad_'); use "
                               .. "x:requires_grad(), or net:freeze()",
    ["net:foo()"] = "1: attempt to call a nil value (method 'foo')",
    ["nn.sequential{nn.conv2d{1, 1, 1}, set = 5}"] =
      "1: nn.sequential: layer set must be a module or a function, but is a number",
  } do
    local at = T.folder(("local lt = require 'luatrain' local nn = lt.nn local net = "
                         .. "nn.sequential{nn.flatten()} %s\n"):format(script))
    T.equal(T.run(at, "t.lua"), "luatrain: t.lua:" .. message .. "\n")
  end
end)

-- ==== All functions, with all kinds of wrong arguments ===========================================

local KINDS, N_KINDS = {nil, {}, {5}, {a = 1}, 0, -1, 0.5, "/dev/null/x", true, function() end,
                        env.x, net, set, env.sgd}, 14

-- Calls fn(first..., a, b) with every pair of values, and fewer arguments. Appends the messages
-- without a line of this file to `wrong`: those that Lua raises in a file of the library.
local function call_with_all(wrong, name, fn, ...)
  local n, args = select("#", ...), {...}
  for i = 1, N_KINDS * N_KINDS do
    local count = i == 1 and 0 or i <= N_KINDS and 1 or 2
    args[n + 1], args[n + 2] = KINDS[(i - 1) % N_KINDS + 1], KINDS[(i - 1) // N_KINDS + 1]
    local ok, why = pcall(fn, table.unpack(args, 1, n + count))
    if not ok and not tostring(why):find "^tests/lua/test_mistakes.lua:%d+: " then
      wrong[name .. ": " .. tostring(why)] = true
    end
  end
end

T.test("no function of the library fails with a line of its own", function()
  local wrong, scaler <close> = {}, lt.amp.scaler{}
  local run <close> = lt.run(env.s{out = T.folder()})
  for prefix, functions in pairs{["lt."] = lt, ["nn."] = nn, ["optim."] = lt.optim,
                                 ["schedule."] = lt.schedule, ["data."] = lt.data,
                                 ["models."] = lt.models, ["metrics."] = lt.metrics} do
    for name, fn in pairs(functions) do
      local has_effects = name == "args" or name == "seed"
      if type(fn) == "function" and fn ~= lt.metrics.read and not has_effects then
        call_with_all(wrong, prefix .. name, fn)
      end
    end
  end
  local function methods(object, prefix, names)
    for name in names:gmatch "[%w_]+" do
      call_with_all(wrong, prefix .. name, object[name], object)
      call_with_all(wrong, prefix .. name .. " with a dot", object[name])
    end
  end
  methods(net, "net:", "parameters named_parameters named_buffers count train eval to freeze "
          .. "zero_grad sha256 state load")
  methods(set, "set:", "open_batches batches sized")
  methods(env.sgd, "optim:", "has class settings set zero_grad state load step")
  methods(scaler, "scaler:", "compare inside begin latest at close settings state load")
  methods(run, "run:", "mixup evaluate report step save batches epochs")
  for _, layer in ipairs{net, nn.conv2d{3, 2, 1}, nn.batch_norm{3}, nn.layer_norm{3},
                         nn.group_norm{1, 3}, nn.embedding{2, 2}, nn.residual{nn.linear{3, 3}},
                         nn.relu(), nn.max_pool2d{2}, nn.dropout(), nn.flatten()} do
    call_with_all(wrong, tostring(layer), layer)
  end
  local list = {}
  for text in pairs(wrong) do list[#list + 1] = text end
  table.sort(list)
  T.equal(table.concat(list, "\n"), "")
end)

-- Files of other programs.
T.test("a file that is no safetensors file is named", function()
  local TORCH = " of PyTorch, not a safetensors file; in Python, safetensors.torch.save_file("
                .. "torch.load(FILE), 'new.safetensors') converts a dict of tensors"
  local path = T.folder() .. "/file"
  for begin, is in pairs{
    ["PK\3\4\0\0\8\8\0\0"] = "this is a zip archive, such as a .pth file" .. TORCH,
    ["\x80\2\x8a\10l\xfc\x9cF\xf9"] = "this is a pickle, such as an old .pth file" .. TORCH,
    ["\x93NUMPY\1\0v\0"] = "this is an array of NumPy, not a safetensors file; convert it in "
      .. "Python with safetensors.numpy.save_file({name: array}, 'new.safetensors')",
    ["\xff\xff\xff\xff\0\0\0\0{}"] = "this is not a safetensors file: its header would be longer "
      .. "than the 100000000 bytes that the format allows",
  } do
    T.write(path, begin)
    T.fails(function() lt.load(path) end, path .. ": " .. is)
    T.fails(function() net:load(path) end, path .. ": " .. is)
  end
end)

T.finish()
