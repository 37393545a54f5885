-- curves.lua - prints the test accuracy of runs after each epoch, in percent, as a table with one
-- line per run. Then it prints, for each group of runs whose names differ only in the seed at the
-- end, the mean of their last accuracies.
--
--   luatrain curves.lua r20-off-0 r20-off-1 r20-off-2 > curves.txt
local log = require "luatrain.train.log"

local groups, order = {}, {}
for _, folder in ipairs(arg) do
  local name = folder:gsub("/+$", ""):match "[^/]*$"
  local group = name:gsub("%-%d+$", "")
  local line, last = {("%-20s"):format(name)}, nil
  for event in log.read(folder .. "/metrics.jsonl") do
    if event.event == "epoch" then
      last = 100 * event.top1
      line[#line + 1] = ("%.2f"):format(last)
    end
  end
  print(table.concat(line, " "))
  if not groups[group] then
    groups[group], order[#order + 1] = {}, group
  end
  table.insert(groups[group], last)
end
print ""
for _, group in ipairs(order) do
  local sum = 0.0
  for _, top1 in ipairs(groups[group]) do sum = sum + top1 end
  print(("%-20s mean of %d: %.2f"):format(group, #groups[group], sum / #groups[group]))
end
