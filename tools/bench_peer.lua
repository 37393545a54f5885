-- bench_peer.lua - what bench.lua and bench_pipeline.lua share: their output, calls of PyTorch, the
-- peer, and series of measurements.
local lt = require "luatrain"
local bench = require "luatrain.commands.bench"
local processes = require "processes"

local shared = {folder = arg[0]:match "^(.*)/" or "."}

-- ==== Output =====================================================================================

function shared.fail(code, ...)
  io.stderr:write("tools/bench: ", string.format(...), "\n")
  os.exit(code, true)
end

function shared.refuse(...) shared.fail(2, ...) end

-- Prints a line and flushes it, to show progress. A failed write (disk full) is an error.
function shared.print(text)
  local ok, why = io.stdout:write(text, "\n")
  if ok then ok, why = io.stdout:flush() end
  if not ok then shared.fail(5, "stdout: %s", why) end
end

function shared.rate_text(rate) return (rate < 100 and "%.1f" or "%.0f"):format(rate) end
function shared.ratio_text(times) return ("%.2fx"):format(times) end

-- Splits the value of a flag at its commas. Each word must be a key of known.
function shared.words_of(flag, text, known)
  local list, names = {}, {}
  for name in pairs(known) do names[#names + 1] = name end
  table.sort(names)
  for word in text:gmatch "[^,]+" do
    if not known[word] then
      shared.refuse("--%s: unknown name '%s'%s", flag, word,
                    lt.check.hint(word, names, " (known: " .. table.concat(names, ",") .. ")"))
    end
    list[#list + 1] = word
  end
  if #list == 0 then shared.refuse("--%s requires some of %s", flag, table.concat(names, ",")) end
  return list
end

-- ==== The peer ===================================================================================

-- The command of the peer. luatrain sets GOMP_SPINCOUNT for OpenMP, which the peer must not
-- inherit.
function shared.peer_words(peer, what)
  return {"env", "-u", "GOMP_SPINCOUNT", peer, shared.folder .. "/bench_torch.py", what}
end

function shared.call_peer(peer, what, options)
  return processes.call(shared.peer_words(peer, what), options)
end

-- "PyTorch 2.15.0", or nil if peer is "". Refuses a program that is not a Python with PyTorch.
function shared.peer_version(peer)
  if peer == "" then return nil end
  local known = shared.call_peer(peer, "version", {})
  if not known or not known.version then
    shared.refuse("--peer: '%s' is not a Python that has PyTorch", peer)
  end
  return "PyTorch " .. known.version
end

-- Calls measure(layout) for both layouts. Returns the faster one and its result; nil if a
-- measurement fails.
function shared.try_layouts(measure)
  local last = measure "channels_last"
  local plain = last and measure "contiguous"
  if not plain then return nil end
  if last.images_per_s > plain.images_per_s then return "channels_last", last end
  return "contiguous", plain
end

-- ==== Series =====================================================================================

-- A series of measurements, one per round, has their rates, their median rate, and the fastest
-- result.
function shared.new_series() return {rates = {}} end

-- Adds a result to a series. Returns false if result is nil, after a failure.
function shared.add(series, result)
  if not result then return false end
  series.rates[#series.rates + 1] = result.images_per_s
  series.images_per_s = bench.spread(series.rates)
  local best = series.best
  if not best or result.images_per_s > best.images_per_s then series.best = result end
  return true
end

-- The median, over all rounds, of the rates of one series divided by those of another.
function shared.ratio(ours, other)
  local list = {}
  for i, rate in ipairs(other.rates) do list[i] = ours.rates[i] / rate end
  return #list > 0 and bench.spread(list) or nil
end

return shared
