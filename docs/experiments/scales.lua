-- scales.lua - prints a table with one line per run with --amp fp16 --amp-check N: the number of
-- skipped steps, the smallest and the largest loss scale, and the mean fraction of gradient
-- elements that underflowed. The mean excludes the first check, because no step has tried its scale
-- yet.
--
--   luatrain scales.lua mn-fp16-0 mn-dynamic-0 > scales.txt
print "                     skipped         scale   underflow"
for _, folder in ipairs(arg) do
  local skipped, least, most, sum, n = 0, math.huge, 0, 0.0, 0
  for line in io.lines(folder .. "/metrics.jsonl") do
    local step = tonumber(line:match '"step":(%d+)')
    if line:find('{"event":"step"', 1, true) then
      local scale = tonumber(line:match '"scale":([%d.e+-]+)')
      skipped = tonumber(line:match '"skipped":(%d+)')
      least, most = math.min(least, scale), math.max(most, scale)
    elseif line:find('{"event":"amp_check"', 1, true) and step > 1 then
      -- the value for all layers, which follows the array of layers
      local share = line:match '%].*"underflow":([%d.e+-]+)'
      sum, n = sum + tonumber(share), n + 1
    end
  end
  print(("%-20s %7d   2^%d to 2^%d   %.2g %%"):format(folder:match "[^/]*$", skipped,
        math.log(least, 2), math.log(most, 2), 100 * sum / n))
end
