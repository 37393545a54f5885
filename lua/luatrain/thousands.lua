-- thousands.lua - a number as text with separators: 1180.4 as "1,180".

return function(n)
  local text = ("%.0f"):format(n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (text:gsub("^(-?),", "%1"))
end
