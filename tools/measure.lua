-- measure.lua - what the benchmarks and checks in tools/ share: their output, other processes, the
-- peer PyTorch, and series of measurements.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local json = require "luatrain.json"
local sorted = require "luatrain.keys"

local measure = {folder = arg[0]:match "^(.*)/" or "."}
local tool = "tools/" .. arg[0]:match "([^/]*)%.lua$":gsub("^bench_.*", "bench")

-- ==== Output =====================================================================================

function measure.fail(code, ...)
  io.stderr:write(tool, ": ", string.format(...), "\n")
  os.exit(code, true)
end

function measure.refuse(...) measure.fail(2, ...) end

-- Prints a line, formatted if there are more arguments, and flushes it to show progress. A failed
-- write (disk full) is an error.
function measure.print(text, ...)
  if select("#", ...) > 0 then text = text:format(...) end
  local ok, why = io.stdout:write(text, "\n")
  if ok then ok, why = io.stdout:flush() end
  if not ok then measure.fail(5, "stdout: %s", why) end
end

function measure.rate_text(rate) return (rate < 100 and "%.1f" or "%.0f"):format(rate) end
function measure.memory_text(bytes) return ("%.2f GB"):format(bytes / 1e9) end
function measure.ratio_text(times) return ("%.2fx"):format(times) end

-- Returns a function that formats a row of a table, without blanks at its end.
function measure.row_of(format)
  return function(...) return (format:format(...):gsub(" +$", "")) end
end

-- Splits the value of a flag at its commas. Each word must be a key of known. With `kind`, what a
-- word is, the messages do not list the keys.
function measure.words_of(flag, text, known, kind)
  local list, names = {}, not kind and sorted(known)
  local all = names and table.concat(names, ",")
  for word in text:gmatch "[^,]+" do
    if not known[word] then
      measure.refuse("--%s: unknown %s '%s'%s", flag, kind or "name", word,
                     names and lt.check.hint(word, names, " (known: " .. all .. ")") or "")
    end
    list[#list + 1] = word
  end
  if #list == 0 then
    measure.refuse("--%s requires %s", flag, names and "some of " .. all or "at least one")
  end
  return list
end

-- ==== Processes ==================================================================================

-- The path of the running program, luatrain.
function measure.program()
  local file <close> = assert(io.open("/proc/self/cmdline", "rb"))
  return file:read "a":match "^[^\0]*"
end

-- The word for a shell, in quotes if it needs them.
function measure.quote(word)
  word = tostring(word)
  if word:find "^[%w_./:=,+-]+$" then return word end
  return "'" .. word:gsub("'", "'\\''") .. "'"
end

-- A command line for a shell: the quoted words, then --name=value for each option, or --name if its
-- value is true. Leaves out options that are false.
function measure.command(words, options)
  local list = {}
  for i, word in ipairs(words) do list[i] = measure.quote(word) end
  for _, name in ipairs(sorted(options or {})) do
    local value = options[name]
    if value == true then
      list[#list + 1] = "--" .. name
    elseif value then
      list[#list + 1] = measure.quote(("--%s=%s"):format(name, value))
    end
  end
  return table.concat(list, " ")
end

-- The words of a command that runs another one for at most this many seconds.
function measure.limited(words, seconds)
  return {"timeout", "-s", "KILL", seconds, table.unpack(words)}
end

-- Prints the command for the measurements or checks that a tool did not reach. tools/gpu_first
-- repeats these lines.
function measure.print_rest(words, options)
  local build = os.getenv "BUILD"
  if build then words = {"env", "BUILD=" .. build, table.unpack(words)} end
  print("not reached: " .. measure.command(words, options))
end

-- Runs a command and returns its last line of output, parsed as JSON. Returns nil and the exit code
-- if the command fails, which prints its own error, or if the line is not a JSON object. The third
-- result is then the last line, if it is one.
function measure.call(words, options)
  local pipe = assert(io.popen(measure.command(words, options), "r"))
  local last = ""
  for line in pipe:lines() do last = line end
  local ok, result = pcall(json.read, last)
  local done, how, code = pipe:close()
  if how == "signal" then code = 128 + code end
  result = ok and type(result) == "table" and result or nil
  if done and result then return result end
  return nil, code, result
end

-- ==== The peer ===================================================================================

-- The command of the peer. luatrain sets GOMP_SPINCOUNT for OpenMP, which the peer must not
-- inherit.
function measure.peer_words(peer, what)
  return {"env", "-u", "GOMP_SPINCOUNT", peer, measure.folder .. "/bench_torch.py", what}
end

function measure.call_peer(peer, what, options)
  return measure.call(measure.peer_words(peer, what), options)
end

-- "PyTorch 2.15.0", or nil if peer is "", and a text for people. Refuses a program that is not a
-- Python with PyTorch. seconds: its time limit, or nil.
function measure.peer_version(peer, seconds)
  if peer == "" then return nil, "none; give a Python that has PyTorch with --peer" end
  local words = measure.peer_words(peer, "version")
  local known = measure.call(seconds and measure.limited(words, seconds) or words)
  if not known or not known.version then
    measure.refuse("--peer: '%s' is not a Python that has PyTorch", peer)
  end
  return "PyTorch " .. known.version, "PyTorch " .. known.version
end

-- Calls run(layout) for both layouts. Returns the faster one and its result; nil if a measurement
-- fails.
function measure.try_layouts(run)
  local last = run "channels_last"
  local plain = last and run "contiguous"
  if not plain then return nil end
  if last.images_per_s > plain.images_per_s then return "channels_last", last end
  return "contiguous", plain
end

-- ==== Series =====================================================================================

-- A series of measurements, one per round, has their rates, their median rate, and the fastest
-- result.
function measure.new_series() return {rates = {}} end

-- Adds a result to a series. Returns false if result is nil, after a failure.
function measure.add(series, result)
  if not result then return false end
  series.rates[#series.rates + 1] = result.images_per_s
  series.images_per_s = bench.spread(series.rates)
  local best = series.best
  if not best or result.images_per_s > best.images_per_s then series.best = result end
  return true
end

-- The median, over all rounds, of the rates of one series divided by those of another.
function measure.ratio(ours, other)
  local list = {}
  for i, rate in ipairs(other.rates) do list[i] = ours.rates[i] / rate end
  return #list > 0 and bench.spread(list) or nil
end

return measure
