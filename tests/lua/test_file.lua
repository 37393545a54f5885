-- test_file.lua - lt.save and lt.load, and files that are damaged. Nets in files: test_nn.lua.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local path = os.tmpname()

local function slurp()
  local file <close> = assert(io.open(path, "rb"))
  return file:read "a"
end

local function spit(bytes)
  local file <close> = assert(io.open(path, "wb"))
  file:write(bytes)
end

-- Byte i, from the end with negatives, gets another lowest bit.
local function flip(i)
  local bytes = slurp()
  if i < 0 then i = #bytes + 1 + i end
  spit(bytes:sub(1, i - 1) .. string.char(bytes:byte(i) ~ 1) .. bytes:sub(i + 1))
end

-- The file does not load, and the reason matches.
local function damaged(load, pattern)
  local ok, why = pcall(load, path)
  assert(not ok, "it loads")
  assert(why:gsub("^[^:]*:%d+: ", ""):gsub(path, "PATH", 1):find(pattern), why)
end

T.test("a digest is written, and is no text of the user's", function()
  lt.save(path, {x = lt.tensor({1, 2})}, {note = "y"})
  assert(slurp():find('^........{"__metadata__":{"sha256":"%x+","note":"y"},"x":'))
  local tensors, texts = lt.load(path)
  T.equal(tensors.x:totable(), {1.0, 2.0})
  T.equal(texts, {note = "y"})
  T.fails(function() lt.save(path, {x = lt.tensor(1)}, {sha256 = 5}) end,
          path .. ": no metadata can be called sha256")
end)

T.test("a flipped bit is found by whoever loads", function()
  local net = nn.sequential{nn.linear{2, 3}}
  local function load_net() return net:load(path) end
  local before = net:sha256()
  lt.save(path, nn.sequential{nn.linear{2, 3}})
  flip(-1)
  local words = "^PATH: it is damaged: its digest is %x+%.%.%., its content's is %x+%.%.%.$"
  damaged(lt.load, words)
  damaged(load_net, words)
  T.equal(net:sha256(), before)
  flip(-1)
  net:load(path)
  assert(net:sha256() ~= before)
  flip(8 + #'{"__metadata__":{"s')
  damaged(lt.load, words)
end)

T.test("a file that was cut short", function()
  lt.save(path, {x = lt.ones({100})})
  spit(slurp():sub(1, -2))
  damaged(lt.load, "^PATH: tensor 'x' ends at byte 400 of the data, the file has 399; "
                   .. "it is cut short or damaged$")
end)

T.test("a file of another program has no digest", function()
  local header = '{"__metadata__":{"format":"pt"},'
                 .. '"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
  spit(string.pack("<s8", header) .. "\3\4")
  local tensors, texts = lt.load(path)
  T.equal(tensors.x:totable(), {3, 4})
  T.equal(texts, {format = "pt"})
end)

os.remove(path)
T.finish()
