-- sum.lua - returns the sum of a list of numbers, added in order.

return function(list)
  local sum = 0.0
  for _, number in ipairs(list) do sum = sum + number end
  return sum
end
