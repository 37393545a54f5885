-- parallel_items.lua - reads the value of --parallel: "key=value,key=value".

local core = ...
local hint = require "luatrain.check".hint

local items = {}

local function refuse(...) core.fail("EUSAGE", string.format(...)) end

-- Iterates over the items of "a,b,c".
function items.of(text) return (text .. ","):gmatch "([^,]*)," end

-- The integer in text, from `least` to `most`, which may be nil.
function items.integer(key, text, least, most)
  local value = math.tointeger(tonumber(text))
  if value and value >= least and value <= (most or value) then return value end
  local range = most and ("from %d to %d"):format(least, most) or ("of at least %d"):format(least)
  refuse("--parallel: %s must be an integer %s, but is '%s'", key, range, text)
end

-- Returns a table of the values by key. form: the allowed text; keys: the list of keys, for hints.
-- read[key](value) checks and converts a value; a key that is in lists may be repeated, and has the
-- list of its values.
function items.read(text, form, keys, read, lists)
  local o = {}
  for key in pairs(lists) do o[key] = {} end
  for item in items.of(text) do
    local key, value = item:match "^([^=]+)=(.+)$"
    if not read[key] then
      refuse("--parallel must be %s, but has '%s'%s", form, item, key and hint(key, keys, "") or "")
    elseif lists[key] then
      table.insert(o[key], read[key](value))
    elseif o[key] then
      refuse("--parallel: %s is given twice in '%s'", key, text)
    else
      o[key] = read[key](value)
    end
  end
  return o
end

return items
