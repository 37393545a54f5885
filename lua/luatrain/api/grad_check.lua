-- grad_check.lua - lt.grad_check: compares the gradients of a function with central differences, in
-- float64 on the CPU.

local core = ...
local check = require "luatrain.check"
local ops, constructors = core.ops, core.constructors

local spec = check "lt.grad_check(f, inputs, {; eps=1e-5, tol=1e-6})"

local function fail(...) core.fail("EINVAL", "lt.grad_check: " .. string.format(...)) end

-- Reduces the result of f to one number. Each element has a different weight, so that errors of
-- several elements do not cancel.
local function project(y)
  if not core.is_tensor(y) then
    fail("the function must return a tensor, but returned a %s", type(y))
  end
  local weights = {}
  for i = 1, y:count() do weights[i] = math.cos(i) end
  weights = constructors.tensor(weights, {dtype = "f64", device = "cpu"})
  return ops.sum(ops.mul(ops.reshape(ops.cast(y, "f64"), {y:count()}), weights))
end

local function is_float(x) return x.dtype:match "^b?f" ~= nil end

-- A float64 copy that collects a gradient.
local function leaf(x)
  return constructors.zeros(x.shape, {dtype = "f64", device = "cpu"}):copy(x):requires_grad()
end

-- The indices of element k in row-major order, as text: "(2, 3)".
local function indices(k, shape)
  local list = {}
  for axis = #shape, 1, -1 do
    table.insert(list, 1, (k - 1) % shape[axis] + 1)
    k = (k - 1) // shape[axis] + 1
  end
  return "(" .. table.concat(list, ", ") .. ")"
end

-- The central differences of value() for all elements of x, as a list. value() must depend on x.
local function numeric(x, value, eps)
  local flat, list = ops.reshape(x:detach(), {x:count()}), {}
  for k = 1, #flat do
    local middle = flat:get(k)
    flat:set(k, middle + eps)
    local up = value()
    flat:set(k, middle - eps)
    list[k] = (up - value()) / (2 * eps)
    flat:set(k, middle)
  end
  return list
end

-- Returns true, or raises an error that names the first element with a wrong gradient. Checks the
-- float tensors among inputs; f gets copies of them in float64 on the CPU.
return function(f, inputs, options)
  local given, copies, differences = spec(options), {}, {}
  if type(f) ~= "function" or type(inputs) ~= "table" then
    fail("requires a function and a list of tensors: lt.grad_check(f, {x, w})")
  end
  for i, x in ipairs(inputs) do
    if not core.is_tensor(x) then fail("input %d must be a tensor, but is a %s", i, type(x)) end
    copies[i] = is_float(x) and leaf(x) or x.device == "cpu" and x or x:to "cpu"
  end
  local function value()
    return core.step(function() return project(f(table.unpack(copies))):item() end)
  end
  if core.no_grad(value) ~= core.no_grad(value) then
    fail("the function returns another value when it is called again")
  end
  for i, x in ipairs(copies) do
    if is_float(x) then differences[i] = core.no_grad(numeric, x, value, given.eps) end
  end
  project(f(table.unpack(copies))):backward()
  for i, list in pairs(differences) do
    local grad = copies[i].grad and ops.reshape(copies[i].grad, {#list})
    for k, wanted in ipairs(list) do
      local came = grad and grad:get(k) or 0
      local most = given.tol * math.max(1, math.abs(wanted), math.abs(came))
      if not (math.abs(wanted - came) <= most) then
        fail("input %d, element %s: numeric %.9g, analytic %.9g", i, indices(k, copies[i].shape),
             wanted, came)
      end
    end
  end
  return true
end
