-- report.lua - shows the cost of runs beside published ones: `luatrain report FOLDER`.
--
-- cost.lua defines the cost. Device-hours are only comparable between equal devices; for different
-- devices they are converted to V100-hours, in proportion to the peak rates of dense products in 16
-- bits, or in 32 bits if a device is not faster in 16.

local core = ...
local columns = require "luatrain.commands.bench".columns
local cost_of = require "luatrain.train.cost".of
local duration = require "luatrain.train.log".duration
local read_flags = require "luatrain.commands.flags"

local report = {}

local function refuse(...) core.fail("EUSAGE", "report: " .. string.format(...)) end

local V100 = 125                  -- peak Tflop/s in 16 bits

-- Published training runs of ResNet-50 on ImageNet: {authors, number of devices, device, its peak
-- Tflop/s from the data sheet, seconds, top1 in percent}. fast.ai published only top5 (93 %).
local PUBLISHED = {
  {"Goyal et al. 2017", 256, "P100", 21.2, 3600, 76.3},
  {"Akiba et al. 2017", 1024, "P100", 21.2, 900, 74.9},
  {"You et al. 2018", 2048, "KNL 7250", 6.1, 1200, 75.4},
  {"Jia et al. 2018", 2048, "P40", 12, 396, 75.8},
  {"Mikami et al. 2018", 2176, "V100", 125, 224, 75.03},
  {"Mikami et al. 2018, v2", 3456, "V100", 125, 122, 75.29},
  {"Ying et al. 2018", 1024, "TPU v3", 123, 132, 76.3},
  {"Yamazaki et al. 2019", 2048, "V100", 125, 74.7, 75.08},
  {"fast.ai and DIUx 2018", 128, "V100", 125, 1080, nil},
  {"NVIDIA, 50 epochs", 8, "V100", 125, 7920, 75.81},
  {"Lambda 2018, 27 epochs", 8, "Titan RTX", 130.5, 8532, 75.92},
  {"hybrid gradient computing", 24, "V100", 125, 1200, 75.6},
}

local HELP = [[
usage: luatrain report [report options] FOLDER...

Shows the cost of the runs in these folders until they reached the test accuracy: the time, and
device-hours, which is the time multiplied by the ranks. Below them are published results.

  --target X     accuracy to reach, such as 0.75 (that of the run, lt.fit{target = 0.75})
  --peak TFLOPS  peak rate of a device in 16 bits, to convert device-hours to those of a V100
  --help         print this help]]

-- ==== The table ==================================================================================

local function hours_text(device_s) return device_s and ("%.3g"):format(device_s / 3600) or "" end

local function percent_text(share) return share and ("%.2f %%"):format(share) or "" end

-- The cells of a row: system, devices, time, top1, device-hours, V100-hours. peak: in Tflop/s, nil
-- if unknown.
local function cells(system, devices, seconds, top1, device_s, peak)
  return {system, devices, seconds and duration(seconds) or "not reached", percent_text(top1),
          hours_text(device_s), peak and hours_text(device_s and device_s * peak / V100) or ""}
end

local function run_cells(folder, o)
  local path = folder .. "/metrics.jsonl"
  local ok, cost, odd = pcall(cost_of, path, o.target)
  if not ok then refuse("%s", cost) end
  if not cost then refuse("%s is not a valid log of a run: %s", path, odd) end
  local s = cost.start
  if not s then refuse("%s is not from a run: it has no line \"start\"", path) end
  if not cost.target then
    refuse("%s has no target; give one with --target 0.75", folder)
  end
  local devices = ("%d x %s, %d thread%s"):format(cost.ranks, s.device, s.threads,
                                                 s.threads == 1 and "" or "s")
  local reached, best = cost.reached or {}, cost.best and 100 * cost.best
  return cells(("%s, to %.4g %%"):format(folder, 100 * cost.target), devices, reached.seconds,
               reached.top1 and 100 * reached.top1 or best, reached.device_s, o.peak)
end

local function table_text(folders, o)
  local lines = {{"run", "devices", "time", "top1", "device-h", "V100-h"}}
  for _, folder in ipairs(folders) do lines[#lines + 1] = run_cells(folder, o) end
  lines[#lines + 1] = {"", "", "", "", "", ""}
  lines[#lines + 1] = {"ResNet-50, ImageNet", "", "", "", "", ""}
  for _, row in ipairs(PUBLISHED) do
    local who, n, kind, peak, seconds, top1 = table.unpack(row, 1, 6)
    lines[#lines + 1] = cells(who, ("%d x %s, %g Tflop/s"):format(n, kind, peak), seconds, top1,
                              n * seconds, peak)
  end
  return columns(lines, 2)
end

-- ==== luatrain report ============================================================================

local function up_to(most)
  return function(text)
    local number = tonumber(text)
    return number and number > 0 and number <= most and number
  end
end

local OPTIONS = {target = {"a positive number up to 1", up_to(1)},
                 peak = {"a positive number of Tflop/s", up_to(math.huge)}, help = true}

-- Prepares `luatrain report`. Returns nil, since there is no script, and a function that prints the
-- report.
function report.attach(...)
  local list, o = {...}, {}
  local folders = table.move(list, read_flags(list, OPTIONS, o, HELP, refuse), #list, 1, {})
  if #folders == 0 then refuse "name the folder of a run, as in luatrain report runs/train-1" end
  return nil, function() print(table_text(folders, o)) end
end

return report
