-- test_args.lua - flags of scripts.
local lt = require "luatrain"
local T = require "lt_test"

local defaults = {data = "x", epochs = 3, lr = 0.5, fast = false, max_steps = 10}

local function read(...)
  arg = {[0] = "dir/script.lua", ...}
  return lt.args(defaults)
end

-- A usage error has no line: it is not the script's fault.
local function refuses(message, ...)
  local ok, why = pcall(read, ...)
  assert(not ok)
  T.equal(why, message)
end

T.test("flags", function()
  T.equal(read(), defaults)
  T.equal(read("--data", "y", "--epochs=5", "--lr", "1", "--fast", "--max-steps", "7"),
          {data = "y", epochs = 5, lr = 1.0, fast = true, max_steps = 7})
  T.equal(read("--fast=false", "--data=", "--lr=1e-3", "--max_steps=1"),
          {data = "", epochs = 3, lr = 1e-3, fast = false, max_steps = 1})
end)

T.test("refused", function()
  refuses("script.lua: unknown option '--epoch' (did you mean '--epochs'?)", "--epoch", "3")
  refuses("script.lua: unknown option 'stray' (--help lists them)", "stray")
  refuses("script.lua: --epochs wants a whole number, it is '3.5'", "--epochs", "3.5")
  refuses("script.lua: --lr wants a number, it is 'big'", "--lr=big")
  refuses("script.lua: --fast wants true or false, it is '1'", "--fast=1")
  refuses("script.lua: --data wants a value", "--data")
  T.fails(function() lt.args{f = print} end,
          "lt.args: the default of f wants a string, a number or a boolean")
end)

local function run(flags)
  local path = os.tmpname()
  local script = assert(io.open(path, "w"))
  script:write [[
    local o = require "luatrain".args{epochs = 3, lr = 0.5, fast = false}
    print(o.epochs)]]
  script:close()
  local pipe = assert(io.popen(("%s %s %s 2>&1"):format(T.program(), path, flags)))
  local text = pipe:read "a"
  local _, _, code = pipe:close()
  os.remove(path)
  return code, (text:gsub("lua_%w+", "SCRIPT"))
end

T.test("exit codes", function()
  local code, text = run "--epochs 4"
  T.equal(code .. text, "04\n")
  code, text = run "--epoch 4"
  T.equal(code .. text, "2luatrain: SCRIPT: unknown option '--epoch' (did you mean '--epochs'?)\n")
  code, text = run "--help"
  T.equal(code .. text, "0usage: luatrain SCRIPT [options]\n  --epochs N               (3)\n"
          .. "  --fast                   (false)\n  --lr N                   (0.5)\n")
end)

T.finish()
