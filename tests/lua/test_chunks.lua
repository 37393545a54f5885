-- test_chunks.lua - no function loads compiled Lua code; all accept source text only.
local T = require "lt_test"

local folder = T.folder()
local compiled = string.dump(function() return 7 end)
local REFUSED = ": this is compiled Lua code, which luatrain does not run; use the source text"
local MODE = ": mode 'b' allows only compiled Lua code, which luatrain does not run; use mode 't'"

local function path_of(name, text)
  local path = folder .. "/" .. name
  local file <close> = assert(io.open(path, "wb"))
  file:write(text)
  return path
end

local function reader(text)
  local at = 0
  return function()
    at = at + 1
    return at <= #text and text:sub(at, at) or nil
  end
end

T.test("load accepts source text only", function()
  for _, mode in ipairs{false, "t", "bt"} do
    local function load_it(chunk) return load(chunk, "=chunk", mode or nil) end
    T.equal(load_it "return 7"(), 7)
    T.equal(load_it(reader "return 7")(), 7)
    T.equal({load_it(compiled)}, {nil, "load" .. REFUSED})
    T.equal({load_it(reader(compiled))}, {nil, "load" .. REFUSED})
  end
  T.equal({load(compiled, nil, "b")}, {nil, "load" .. MODE})
  T.equal({load("return +", "=chunk")}, {nil, "chunk:1: unexpected symbol near '+'"})
  T.equal({load("+ 'attempt to load a binary chunk'")},
          {nil, "[string \"+ 'attempt to load a binary chunk'\"]:1: unexpected symbol near '+'"})
  T.equal(load("x = 3; return _ENV", nil, nil, {})().x, 3)
  T.equal(pcall(load("return x", nil, nil, nil)), false)    -- an explicit nil environment counts
  T.equal(select(2, pcall(load)), "bad argument #1 to 'load' (function expected, got no value)")
end)

T.test("loadfile and dofile accept source text only", function()
  local text = path_of("text.lua", "#!/usr/bin/env luatrain\nx = 3; return _ENV")
  local binary = path_of("binary.lua", compiled)
  T.equal(loadfile(text, nil, {})().x, 3)
  T.equal({loadfile(binary)}, {nil, binary .. REFUSED})
  T.equal({loadfile(binary, "b")}, {nil, binary .. MODE})
  T.equal(select(2, loadfile(folder .. "/none.lua")):match "No such file" ~= nil, true)
  T.equal(dofile(path_of("list.lua", "return 1, 2")), 1)
  T.equal(select("#", dofile(folder .. "/list.lua")), 2)
  T.equal({pcall(dofile, binary)}, {false, binary .. REFUSED})
  local co = coroutine.wrap(dofile)
  T.equal(co(path_of("yield.lua", "return coroutine.yield(1) + 1")), 1)
  T.equal(co(2), 3)
end)

T.test("require accepts source text only", function()
  local before = package.path
  package.path = folder .. "/?.lua"
  path_of("good.lua", "return {...}")
  local binary = path_of("bad.lua", compiled)
  T.equal(require "good", {"good", folder .. "/good.lua"})
  local _, why = pcall(require, "bad")
  T.equal(why, ("error loading module 'bad' from file '%s':\n\t%s"):format(binary,
                                                                          binary .. REFUSED))
  T.raises("no file '" .. folder .. "/none.lua'", require, "none")
  package.path = 7 < 8
  _, why = pcall(require, "none")
  T.equal(why, "'package.path' must be a string")
  package.path = before
end)

T.test("a script must be source text", function()
  path_of("script.lua", compiled)
  T.equal({T.run(folder, "script.lua")}, {"luatrain: script.lua" .. REFUSED .. "\n", 1})
end)

T.finish()
