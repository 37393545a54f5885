-- flops.lua - counts the floating-point operations of an op: two per multiply-add, for
-- convolutions, linear layers and matrix products. Other ops count as 0.

local function product(dims, first)
  local n = 1
  for i = first, #dims do n = n * dims[i] end
  return n
end

-- The number of FLOP in an op's forward; the gradient of either of its first two inputs takes the
-- same number. x, w, out: the shapes of these inputs and of the output.
return function(op, x, w, out)
  if op == "conv2d" or op == "linear" then return 2 * product(out, 1) * product(w, 2) end
  if op == "matmul" then return 2 * product(out, 1) * x[#x] end
  return 0
end
