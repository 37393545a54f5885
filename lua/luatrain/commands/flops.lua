-- flops.lua - the floating-point operations of an op: two for each multiply-add, in the ops that
-- consist of them. No others are counted.

local function product(dims, first)
  local n = 1
  for i = first, #dims do n = n * dims[i] end
  return n
end

-- Of the op's forward, or of its backward for one of the first two inputs, from the shapes of these
-- and of the output.
return function(op, x, w, out)
  if op == "conv2d" or op == "linear" then return 2 * product(out, 1) * product(w, 2) end
  if op == "matmul" then return 2 * product(out, 1) * x[#x] end
  return 0
end
