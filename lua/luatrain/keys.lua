-- keys.lua - the sorted keys of a table, for code whose result must not depend on the order of
-- pairs(). Strings are sorted by their bytes, independent of the locale.

local core = ...

return core.in_c_locale(function(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end)
