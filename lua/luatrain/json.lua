-- json.lua - writes and reads JSON, for the files of runs and benchmarks.
--
--   json.text{loss = 0.5, dims = {3, 4}}       '{"dims":[3,4],"loss":0.5}'
--   json.read '{"dims": [3, 4], "loss": 0.5}'  {dims = {3, 4}, loss = 0.5}
--
-- A table with items 1 to n is written as a list, and so is an empty table; any other is written as
-- an object with sorted keys. nan and inf, which JSON lacks, are written as null. null is read as
-- nil.

local core = ...
local sorted = require "luatrain.keys"

local json = {}

local ESCAPES = {['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t"}

-- ==== Writing ====================================================================================

local function escape(c) return ESCAPES[c] or ("\\u%04x"):format(c:byte()) end

local function string_text(value)
  value = value:gsub('[%c"\\]', escape)
  if not utf8.len(value) then value = value:gsub("[\x80-\xff]", escape) end   -- not UTF-8
  return '"' .. value .. '"'
end

local function float_text(value)
  if value - value ~= 0 then return "null" end
  local text = ("%.15g"):format(value)
  if tonumber(text) ~= value then text = ("%.17g"):format(value) end
  return text:find "[.e]" and text or text .. ".0"
end

-- The value as JSON text. lines: the number of outer levels of tables that are written with one
-- item per line; 0 if nil. indent: for the recursion.
function json.text(value, lines, indent)
  local kind = math.type(value) or type(value)
  if kind == "float" then return float_text(value) end
  if kind == "string" then return string_text(value) end
  if kind ~= "table" then return tostring(value) end
  lines, indent = lines or 0, indent or ""
  local items, list, inner = {}, #value > 0 or next(value) == nil, indent .. "  "
  if list then
    for i, item in ipairs(value) do items[i] = json.text(item, lines - 1, inner) end
  else
    for i, key in ipairs(sorted(value)) do
      items[i] = string_text(key) .. ":" .. (lines > 0 and " " or "")
                 .. json.text(value[key], lines - 1, inner)
    end
  end
  local open, close = list and "[" or "{", list and "]" or "}"
  if lines <= 0 or #items == 0 then return open .. table.concat(items, ",") .. close end
  return open .. "\n" .. inner .. table.concat(items, ",\n" .. inner) .. "\n" .. indent .. close
end

-- ==== Reading ====================================================================================

local LETTERS = {n = "\n", r = "\r", t = "\t", b = "\b", f = "\f"}
local WORDS = {["true"] = {true}, ["false"] = {false}, null = {}}

local function refuse(at, wanted)
  core.fail("EDATA", ("JSON: expected %s at byte %d"):format(wanted, at))
end

local function blank(text, at) return text:match("^[ \t\r\n]*()", at) end

local function unescape(letter, digits)
  if letter == "u" then return utf8.char(tonumber(digits, 16)) end
  return (LETTERS[letter] or letter) .. digits
end

-- Each of these functions parses the value that begins at byte `at`. It returns the value and the
-- position after it.

local function read_string(text, at)
  local last = at + 1
  while true do
    local mark = text:find('["\\\0-\31]', last) or refuse(at, "a closing quote")
    local escape = text:match('^\\["\\/bfnrt]()', mark) or text:match("^\\u%x%x%x%x()", mark)
    if text:sub(mark, mark) == '"' then
      local inside = text:sub(at + 1, mark - 1):gsub("\\(.)(%x?%x?%x?%x?)", unescape)
      return inside, mark + 1
    end
    last = escape or refuse(mark, "a character")
  end
end

local read_value

local function read_list(text, at)
  local list, n = {}, 0
  at = blank(text, at + 1)
  while text:sub(at, at) ~= "]" do
    if n > 0 then at = text:match("^,()", at) or refuse(at, "a comma") end
    n = n + 1
    list[n], at = read_value(text, blank(text, at))
    at = blank(text, at)
  end
  return list, at + 1
end

local function read_object(text, at)
  local object, key = {}, nil
  at = blank(text, at + 1)
  while text:sub(at, at) ~= "}" do
    if key then at = blank(text, text:match("^,()", at) or refuse(at, "a comma")) end
    if text:sub(at, at) ~= '"' then refuse(at, "a key") end
    key, at = read_string(text, at)
    at = text:match("^[ \t\r\n]*:()", at) or refuse(at, "a colon")
    object[key], at = read_value(text, blank(text, at))
    at = blank(text, at)
  end
  return object, at + 1
end

function read_value(text, at)
  local first = text:sub(at, at)
  if first == '"' then return read_string(text, at) end
  if first == "[" then return read_list(text, at) end
  if first == "{" then return read_object(text, at) end
  local word, after = text:match("^([%w.+-]+)()", at)
  local known = WORDS[word]
  if known then return known[1], after end
  local is_number = word and word:find "^-?%d" and not word:find "^-?0%d"
                    and not (word .. " "):find "%.%D" and not word:find "[xX]"
  return is_number and tonumber(word) or refuse(at, "a value"), after
end

-- Parses JSON text and returns its value. Raises EDATA with the byte position of a syntax error.
function json.read(text)
  local value, at = read_value(text, blank(text, 1))
  at = blank(text, at)
  if at <= #text then refuse(at, "the end") end
  return value
end

json.text, json.read = core.in_c_locale(json.text), core.in_c_locale(json.read)

return json
