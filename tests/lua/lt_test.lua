-- lt_test.lua - a small test runner for scripts.
--
--   local T = require "lt_test"
--   T.test("adds", function() T.equal(1 + 1, 2) end)
--   T.finish()

local T = {passed = 0, failed = 0, skipped = 0}

-- Returns the list `few` if that is enough, because the test runs with sanitizers and all cases run
-- without: tools/test sets LUATRAIN_TEST_FEW=1. Otherwise returns `all`.
function T.cases(all, few)
  if os.getenv "LUATRAIN_TEST_FEW" == "1" then return few end
  return all
end

function T.test(name, fn)
  local ok, why = xpcall(fn, debug.traceback)
  if ok then
    T.passed = T.passed + 1
    print("ok " .. name)
  else
    T.failed = T.failed + 1
    print(("FAIL %s: %s"):format(name, why))
  end
end

function T.skip(name, why)
  T.skipped = T.skipped + 1
  print(("skip %s: %s"):format(name, why))
end

local function text(value)
  if type(value) ~= "table" or getmetatable(value) then return tostring(value) end
  local items, keys = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  for i, key in ipairs(keys) do items[i] = tostring(key) .. "=" .. text(value[key]) end
  return "{" .. table.concat(items, ", ") .. "}"
end

-- Checks that two values are equal. Tables are compared by content.
function T.equal(got, wanted)
  if text(got) ~= text(wanted) or math.type(got) ~= math.type(wanted) then
    error(("expected %s, got %s"):format(text(wanted), text(got)), 2)
  end
end

function T.near(got, wanted, tolerance)
  if not (math.abs(got - wanted) <= (tolerance or 1e-6)) then
    error(("expected %.9g, got %.9g"):format(wanted, got), 2)
  end
end

-- Checks that fn raises exactly `message`, prefixed with the position of a line of fn.
function T.fails(fn, message)
  local ok, why = pcall(fn)
  if ok then error("expected an error, but there was none: " .. message, 2) end
  local info = debug.getinfo(fn, "S")
  local file, line, rest = tostring(why):match "^([^:]*):(%d+): (.*)$"
  line = tonumber(line)
  local first, last = info.linedefined, info.lastlinedefined
  if file ~= info.short_src or line < first or line > last or rest ~= message then
    error(("expected an error in lines %d to %d: %s\n  got: %s")
          :format(first, last, message, tostring(why)), 2)
  end
end

-- Checks that fn(...) raises an error that contains a text.
function T.raises(text, fn, ...)
  local ok, why = pcall(fn, ...)
  if ok or not tostring(why):find(text, 1, true) then
    error(("expected an error: %s\n  got: %s"):format(text, ok and "none" or tostring(why)), 2)
  end
end

-- Returns the path of the luatrain program that runs this script.
function T.program()
  local file = assert(io.open("/proc/self/cmdline", "rb"))
  local name = file:read "a":match "^[^\0]*"
  file:close()
  return name
end

local folders = {}

function T.write(path, text)
  local file <close> = assert(io.open(path, "w"))
  file:write(text)
end

-- Makes a folder, which T.finish() removes, and returns its path. A script is written to t.lua in
-- it.
function T.folder(script)
  local name = os.tmpname()
  os.remove(name)
  assert(os.execute("mkdir " .. name))
  folders[#folders + 1] = name
  if script then T.write(name .. "/t.lua", script) end
  return name
end

function T.read(path)
  local file <close> = assert(io.open(path))
  return file:read "a"
end

-- Runs `luatrain ARGUMENTS` in a folder. Returns what it prints and its exit code. $L is the
-- program, for shells that it starts. prefix: a command that runs it, such as timeout.
function T.run(folder, arguments, prefix)
  local pipe = assert(io.popen(("export L=$(realpath %s); cd %s; %s $L %s 2>&1; echo '=' $?")
                               :format(T.program(), folder, prefix or "", arguments)))
  local out, code = pipe:read "a":match "^(.*)= (%d+)\n$"
  pipe:close()
  return out, tonumber(code)
end

-- Runs a script on one thread in a new folder. Returns what it prints and its exit code.
function T.run_script(script, options, arguments)
  return T.run(T.folder(script), ("--threads 1 %s t.lua %s"):format(options, arguments or ""))
end

-- Like T.run, and checks the exit code and that the output contains a text. Returns the output.
function T.ends(folder, arguments, code, message, prefix)
  local text, got = T.run(folder, arguments, prefix)
  if got ~= code or not text:find(message, 1, true) then
    error(("%s: expected exit code %d: %s\n  got %d: %s")
          :format(arguments, code, message, got, text), 2)
  end
  return text
end

-- The digest of the weights with which the run in a folder ended last; nil if it has not.
function T.sha(folder)
  local file <close> = io.open(folder .. "/metrics.jsonl")
  return file and file:read "a":match '.*"weights_sha256":"(%x*)"'
end

-- The events of one kind that the run in a folder has logged: a list of tables.
function T.events(folder, kind)
  local list = {}
  for line in io.lines(folder .. "/metrics.jsonl") do
    if line:find('^{"event":"' .. kind .. '"') then
      list[#list + 1] = require "luatrain.json".read(line)
    end
  end
  return list
end

-- The texts of the warnings of the run in a folder.
function T.warnings(folder)
  local list = T.events(folder, "warn")
  for i, event in ipairs(list) do list[i] = event.text end
  return list
end

-- The names in a folder, or the error of ls.
function T.names(folder)
  local pipe <close> = assert(io.popen(("LC_ALL=C ls -A %s 2>&1"):format(folder)))
  return (pipe:read "a":gsub("\n$", ""):gsub("\n", " "))
end

-- A function for run:step: trains net with one optimizer, by cross entropy.
function T.learn(net, optim)
  return function(x, y)
    local loss = require "luatrain".cross_entropy(net(x), y)
    loss:backward()
    optim:step()
    return loss
  end
end

-- Calls fn(x) and closes x in the k-th garbage collection during the call. Each allocation by Lua
-- runs a full collection. finalize: called after x is closed, or nil. Returns whether x was closed
-- during the call, and the results of pcall.
function T.close_within(k, x, fn, finalize)
  local closed = false
  local function arm(left)
    setmetatable({}, {__gc = function()
      if left > 1 then return arm(left - 1) end
      closed = true
      do local _ <close> = x end
      if finalize then finalize() end
    end})
  end
  collectgarbage()
  collectgarbage "stop"
  collectgarbage("incremental", 1, 1000, 63)   -- no pause, and each step is a full collection
  coroutine.wrap(arm)(k)                       -- leaves no reference on this stack
  collectgarbage "restart"
  local ok, value = pcall(fn, x)
  local closed_in_call = closed
  collectgarbage("incremental", 200, 100, 13)
  return closed_in_call, ok, value
end

-- The C core, which only the embedded files can access.
function T.core()
  for i = 1, math.huge do
    local name, value = debug.getupvalue(require "luatrain".load, i)
    if name == "core" then return value end
    assert(name, "lt.load does not have it")
  end
end

-- Ends the script: prints the totals and exits with status 0 if no test failed, else 1.
function T.finish()
  if #folders > 0 then os.execute("rm -rf " .. table.concat(folders, " ")) end
  print(("%d passed, %d failed, %d skipped"):format(T.passed, T.failed, T.skipped))
  os.exit(T.failed == 0, true)
end

return T
