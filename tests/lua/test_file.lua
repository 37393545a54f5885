-- test_file.lua - lt.save, lt.load and damaged files. test_nn.lua saves and loads nets.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

local path = os.tmpname()

local function slurp() return T.read(path) end
local function spit(bytes) T.write(path, bytes) end

-- Flips the lowest bit of byte i, which counts from the end if negative.
local function flip(i)
  local bytes = slurp()
  if i < 0 then i = #bytes + 1 + i end
  spit(bytes:sub(1, i - 1) .. string.char(bytes:byte(i) ~ 1) .. bytes:sub(i + 1))
end

-- Checks that the file does not load and that the error matches.
local function damaged(load, pattern)
  local ok, why = pcall(load, path)
  assert(not ok, "it loads")
  assert(why:gsub("^[^:]*:%d+: ", ""):gsub(path, "PATH", 1):find(pattern), why)
end

T.test("a digest is saved and is not part of the metadata", function()
  lt.save(path, {x = lt.tensor({1, 2})}, {note = "y"})
  assert(slurp():find('^........{"__metadata__":{"sha256":"%x+","note":"y"},"x":'))
  local tensors, texts = lt.load(path)
  T.equal(tensors.x:totable(), {1.0, 2.0})
  T.equal(texts, {note = "y"})
  T.fails(function() lt.save(path, {x = lt.tensor(1)}, {sha256 = 5}) end,
          path .. ": metadata cannot be named sha256")
end)

T.test("metadata maps names to strings, numbers or booleans", function()
  lt.save(path, {x = lt.tensor(1)}, {epoch = 3, best = 0.5, done = false, note = "y"})
  T.equal(select(2, lt.load(path)), {epoch = "3", best = "0.5", done = "false", note = "y"})
  T.fails(function() lt.save(path, {x = lt.tensor(1)}, {"y"}) end,
          "lt.save: the keys of meta must be strings, but one is a number: 1")
  T.fails(function() lt.save(path, {x = lt.tensor(1)}, {note = {}}) end,
          "lt.save: meta.note must be a string, a number or a boolean, but is a table")
  T.fails(function() lt.save(path, {x = lt.tensor(1)}, 5) end,
          "lt.save: meta must be a table of strings")
end)

T.test("a flipped bit is found on loading", function()
  local net = nn.sequential{nn.linear{2, 3}}
  local function load_net() return net:load(path) end
  local before = net:sha256()
  lt.save(path, nn.sequential{nn.linear{2, 3}})
  flip(-1)
  local words = "^PATH: it is damaged: it has digest %x+%.%.%., but its content has %x+%.%.%.$"
  damaged(lt.load, words)
  damaged(load_net, words)
  T.equal(net:sha256(), before)
  flip(-1)
  net:load(path)
  assert(net:sha256() ~= before)
  flip(8 + #'{"__metadata__":{"s')
  damaged(lt.load, words)
end)

T.test("a truncated file", function()
  lt.save(path, {x = lt.ones({100})})
  spit(slurp():sub(1, -2))
  damaged(lt.load, "^PATH: tensor 'x' ends at byte 400 of the data, but the file has 399; it is "
                   .. "cut short or damaged$")
end)

T.test("a file of another program has no digest", function()
  local header = '{"__metadata__":{"format":"pt"},'
                 .. '"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
  spit(string.pack("<s8", header) .. "\3\4")
  local tensors, texts = lt.load(path)
  T.equal(tensors.x:totable(), {3, 4})
  T.equal(texts, {format = "pt"})
end)

T.test("has_digest", function()
  local core = T.core()
  local function has_digest()
    local file <close> = core.open_file(path)
    return file:has_digest()
  end
  lt.save(path, {x = lt.ones({2})})
  assert(has_digest())
  flip(8 + #'{"__metadata__":{"s')
  assert(has_digest())
  flip(8 + #'{"__metadata__":{"sh')
  assert(not has_digest())
  lt.load(path)
end)

T.test("a finalizer may close a file or a tensor that is in use", function()
  local core = T.core()
  local names, tensors, meta = {}, {}, {}
  for i = 1, 50 do
    names[i], tensors[i] = ("a name too long to be kept for long, %d"):format(i), lt.ones({64})
    meta["a text too long to be kept for long, " .. i] = ("%d"):format(i):rep(50)
  end
  local what = {}
  for i, name in ipairs(names) do what[name] = tensors[i] end
  lt.save(path, what, meta)
  local function close_in(x, k, fn)
    local closed, ok, why = T.close_within(k, x, fn)
    assert(ok or why:find " was closed", why)
    return closed
  end
  for _, method in ipairs{"names", "meta", "read", "shape"} do
    local closed = false
    for k = 1, 9 do
      local file = core.open_file(path)
      closed = close_in(file, k, function() return file[method](file, names[7]) end) or closed
    end
    assert(closed, method)
  end
  for k = 1, 4 do
    local list = {lt.ones({64}), lt.ones({64})}
    close_in(list[2], k, function() core.save({"a", "b"}, list, path, {}) end)
  end
end)

os.remove(path)
T.finish()
