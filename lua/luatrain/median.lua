-- median.lua - returns the median of a list of numbers, and sorts the list. Of an even number, the
-- lower of the two middle ones.

return function(list)
  table.sort(list)
  return list[(#list + 1) // 2]
end
