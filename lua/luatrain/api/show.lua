-- show.lua - tostring(tensor): nested tables, as lt.tensor reads them, then shape and dtype. Long
-- axes are abbreviated: only their ends are shown.

local core = ...

local LONG, ENDS = 12, 5

-- The indices to show for an axis of n elements; 0 marks the gap.
local function shown(n)
  local list = {}
  for i = 1, n do
    if n <= LONG or i <= ENDS or i > n - ENDS then
      list[#list + 1] = i
    elseif i == ENDS + 1 then
      list[#list + 1] = 0
    end
  end
  return list
end

-- Returns the numbers to show as nested lists, with false for each gap. Appends them to flat too.
local function read(x, shape, indices, flat)
  local depth = #indices + 1
  if depth > #shape then
    flat[#flat + 1] = core.own_get(x, table.unpack(indices))
    return flat[#flat]
  end
  local list = {}
  for i, index in ipairs(shown(shape[depth])) do
    indices[depth] = index
    list[i] = index > 0 and read(x, shape, indices, flat)
    indices[depth] = nil
  end
  return list
end

-- Chooses one format for all numbers. It ignores nan and inf, which fit any format.
local function format_of(flat)
  if math.type(flat[1]) == "integer" then return "%d" end
  local whole, least, most = true, math.huge, 0
  for _, v in ipairs(flat) do
    local size = math.abs(v)
    if size < math.huge then
      whole = whole and v == math.floor(v)
      most = math.max(most, size)
      if size > 0 then least = math.min(least, size) end
    end
  end
  if whole and most < 1e15 then return "%.0f" end
  return (most >= 1e5 or least < 1e-3) and "%.4e" or "%.4f"
end

local function number(v, format)
  if v ~= v then return "nan" end
  return format:format(v)
end

local function write(value, format, width, indent)
  if value == false then return "..." end
  if type(value) == "number" then return ("%" .. width .. "s"):format(number(value, format)) end
  local items = {}
  for i, item in ipairs(value) do items[i] = write(item, format, width, indent .. " ") end
  local nested = type(value[1]) == "table"
  return "{" .. table.concat(items, nested and ",\n" .. indent .. " " or ", ") .. "}"
end

return core.in_c_locale(function(x)
  local text, state = core.describe(x)
  if state == "dead" then return ("dead tensor %s (its step is over)"):format(text) end
  if state == "pending" then return ("parameter %s (no memory yet)"):format(text) end
  if state == "meta" then return ("tensor %s of another pipeline stage"):format(text) end
  local flat, width = {}, 0
  if x.device ~= "cpu" then
    x, text = x:to "cpu", text .. " on " .. x.device
  end
  local values = read(x, x.shape, {}, flat)
  local format = format_of(flat)
  for _, v in ipairs(flat) do width = math.max(width, #number(v, format)) end
  return write(values, format, width, "") .. "  " .. text
end)
