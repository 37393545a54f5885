-- keys.lua - the keys of a table in their order, for all that must not depend on how pairs() walks.
-- Strings are in the order of their bytes, as no locale changes.

local core = ...

return core.in_c_locale(function(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end)
