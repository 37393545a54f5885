-- plot.lua - draws the curves of a run as SVG. The upper panel shows the training loss, as a faint
-- and a smoothed line, and the test loss after each epoch. The lower panel shows top-1 after each
-- epoch. The SVG is self-contained, a few KB in size, and adapts to light and dark mode.
--
--   local svg = require "luatrain.train.plot".curves(log.read(path), "train_resnet-1")

local core = ...
local thousands = require "luatrain.thousands"

local plot = {}

-- Positions in pixels. The space to the right of the panels is for the labels of the lines.
local WIDTH, LEFT, RIGHT = 760, 60, 640
local LOSS, TOP1 = {top = 78, bottom = 288}, {top = 332, bottom = 436}
local BELOW = 48                       -- height of the x axis, in pixels
local BINS = 160                       -- approximate number of points in a line
local LINE = 15                        -- smallest distance between two labels, in pixels
local FEW, MANY = 12, 40               -- up to FEW points: label all; from MANY: only the last dot

local STYLE = [[
text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#59636e}
.back{fill:#fff}.title{font-size:16px;font-weight:600;fill:#1f2328}.strong{font-weight:600}
.end{text-anchor:end}.middle{text-anchor:middle}path{fill:none;stroke-linejoin:round}
.grid{stroke:#e7eaee}.axis{stroke:#aeb6bf}.raw{stroke:#0969da;opacity:.3}
.train{stroke:#0969da;stroke-width:2}.test{stroke:#bc4c00;stroke-width:1.5}
.top1{stroke:#1a7f37;stroke-width:2}.dotted{stroke:#d1242f;stroke-dasharray:2 3}
circle.train,text.train{fill:#0969da;stroke:none}circle.test,text.test{fill:#bc4c00;stroke:none}
circle.top1,text.top1{fill:#1a7f37;stroke:none}text.nan{fill:#d1242f}
@media(prefers-color-scheme:dark){
text{fill:#9198a1}.raw{opacity:.45}.back{fill:#0d1117}.title{fill:#f0f6fc}
.grid{stroke:#21262d}.axis{stroke:#4c535b}
.raw,.train{stroke:#4493f8}.test{stroke:#db6d28}.top1{stroke:#3fb950}.dotted{stroke:#f85149}
circle.train,text.train{fill:#4493f8}circle.test,text.test{fill:#db6d28}
circle.top1,text.top1{fill:#3fb950}text.nan{fill:#f85149}}
]]

-- ==== Scales =====================================================================================

-- The largest step of the form 1, 2 or 5 times a power of ten that divides span into at least n
-- parts.
local function tick_step(span, n)
  local power = 10 ^ math.floor(math.log(span / n, 10) + 1e-9)
  for _, factor in ipairs{5, 2} do
    if factor * power * n <= span * (1 + 1e-9) then return factor * power end
  end
  return power
end

-- Returns a linear function from [low, high] to pixels [from, to]; and ticks, unchanged.
local function linear(low, high, from, to, ticks)
  local function at(value) return from + (value - low) / (high - low) * (to - from) end
  return at, ticks
end

-- The list of multiples of step from low to high.
local function multiples(low, high, step)
  local list = {}
  for k = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) do
    list[#list + 1] = k * step
  end
  return list
end

-- The y scale for losses from low to high in a panel: logarithmic for a large range, otherwise
-- linear, and from 0 if low is small. Returns a function from a loss to a pixel, and the ticks.
local function loss_scale(low, high, panel)
  if low > 0 and high > 25 * low then
    local a, b, list = math.log(low), math.log(high), {}
    for k = math.floor(math.log(low, 10)), math.ceil(math.log(high, 10)) do
      for _, factor in ipairs(high < 3000 * low and {1, 2, 5} or {1}) do
        local value = factor * 10.0 ^ k
        if value >= low and value <= high then list[#list + 1] = value end
      end
    end
    local at = linear(a, b, panel.bottom, panel.top)
    return function(value) return at(math.log(math.max(value, low))) end, list
  end
  if low > 0 and (low < high / 2 or low == high) then low = 0 end
  if low == high then high = low + 1 end
  local step = tick_step(high - low, 4)
  low, high = math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step
  return linear(low, high, panel.bottom, panel.top, multiples(low, high, step))
end

-- The y scale for fractions from low to high, with room above for the labels of points.
local function top1_scale(low, high, panel)
  local room = 1.3 * math.max(high - low, 0.01)
  local step = tick_step(room, 2)
  low = math.max(0, math.floor((low - 0.05 * room) / step) * step)
  high = math.max(high + 0.25 * room, low + 2 * step)
  return linear(low, high, panel.bottom, panel.top, multiples(low, math.min(high, 1), step))
end

-- ==== SVG elements ===============================================================================

local function escaped(text)
  if not utf8.len(text) then text = text:gsub("[\x80-\xff]", "?") end
  text = text:gsub("[&<>]", {["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;"})
  return (text:gsub("%c", " "))
end

local function pixel(v) return ("%.4g"):format(v) end

local function label(out, x, y, text, class)
  out[#out + 1] = ('<text x="%s" y="%s"%s>%s</text>')
                  :format(pixel(x), pixel(y), class and (' class="%s"'):format(class) or "",
                          escaped(text))
end

local function segment(out, class, x1, y1, x2, y2)
  out[#out + 1] = ('<path class="%s" d="M%s %sL%s %s"/>')
                  :format(class, pixel(x1), pixel(y1), pixel(x2), pixel(y2))
end

local function dot(out, class, x, y)
  out[#out + 1] = ('<circle class="%s" cx="%s" cy="%s" r="3"/>'):format(class, pixel(x), pixel(y))
end

-- A line through points, a list of {x, y} in pixels; false makes a gap.
local function line(out, class, points)
  local d, pen = {}, "M"
  for _, p in ipairs(points) do
    if p then d[#d + 1] = pen .. pixel(p[1]) .. " " .. pixel(p[2]) end
    pen = p and "L" or "M"
  end
  if #d > 1 then out[#out + 1] = ('<path class="%s" d="%s"/>'):format(class, table.concat(d)) end
end

local function y_axis(out, panel, at, ticks, text_of)
  for _, value in ipairs(ticks) do
    segment(out, "grid", LEFT, at(value), RIGHT, at(value))
    label(out, LEFT - 8, at(value) + 4, text_of(value), "end")
  end
  segment(out, "axis", LEFT, panel.bottom, RIGHT, panel.bottom)
end

-- ==== The data ===================================================================================

-- Collects {steps = , losses = , epochs = } from an iterator over events. A loss is false if it is
-- nan. epochs: the epoch events in order; if an epoch was reported twice, only its last report.
local function gather(events)
  local run = {steps = {}, losses = {}, epochs = {}}
  local by_epoch = {}
  for event in events do
    if event.event == "step" then
      run.steps[#run.steps + 1], run.losses[#run.steps + 1] = event.step, event.loss or false
    elseif event.event == "epoch" then
      if not by_epoch[event.epoch] then run.epochs[#run.epochs + 1] = event.epoch end
      by_epoch[event.epoch] = event
    end
  end
  table.sort(run.epochs)
  for i, epoch in ipairs(run.epochs) do run.epochs[i] = by_epoch[epoch] end
  return run
end

-- The mean of loss i and its neighbours: up to n / 50 on either side, fewer near the ends. sums[k]
-- and counts[k] are the sum and number of the first k losses that are not nan.
local function smooth(sums, counts, i, n)
  local before = math.min(n // 50, i - 1)
  local first, last = i - before - 1, i + math.min(before, n - i)
  return (sums[last] - sums[first]) / (counts[last] - counts[first])
end

-- Returns the points {step, loss} of the faint and of the smoothed line; false is a gap. The steps
-- are grouped into bins; the faint line shows the smallest and the largest loss of each bin.
local function thin(steps, losses)
  local sums, counts, raw, even, n = {[0] = 0}, {[0] = 0}, {}, {}, #steps
  for i, loss in ipairs(losses) do
    sums[i], counts[i] = sums[i - 1] + (loss or 0), counts[i - 1] + (loss and 1 or 0)
  end
  local bins = math.min(n, BINS)
  for bin = 1, bins do
    local first, last, least, most = (bin - 1) * n // bins + 1, bin * n // bins, nil, nil
    for i = first, last do
      local loss = losses[i]
      if loss and (not least or loss < losses[least]) then least = i end
      if loss and (not most or loss > losses[most]) then most = i end
    end
    local i = bin == 1 and first or bin == bins and last or (first + last) // 2
    even[bin] = losses[i] and {steps[i], smooth(sums, counts, i, n)}
    raw[#raw + 1] = least and {steps[math.min(least, most)], losses[math.min(least, most)]} or false
    if least ~= most then
      raw[#raw + 1] = {steps[math.max(least, most)], losses[math.max(least, most)]}
    end
  end
  return raw, even
end

-- The smallest and the largest value of a line, after dropping 1 / spare of its points at each end.
-- nil if it has no points.
local function range(points, spare)
  local values = {}
  for _, p in ipairs(points) do
    if p then values[#values + 1] = p[2] end
  end
  table.sort(values)
  local out = #values // spare
  return values[1 + out], values[#values - out]
end

-- ==== The panels =================================================================================

local function placed(points, x, y, panel)
  local list = {}
  for i, p in ipairs(points) do
    list[i] = p and {x(p[1]), math.max(panel.top, math.min(y(p[2]), panel.bottom))}
  end
  return list
end

-- Draws labels {point, text, class} beside the ends of lines, without overlap.
local function end_labels(out, list)
  table.sort(list, function(a, b) return a[1][2] < b[1][2] end)
  local least = 0
  for _, item in ipairs(list) do
    local x, y = item[1][1], math.max(item[1][2], least)
    label(out, x + 10, y + (x < RIGHT and -8 or 4), item[2], item[3] .. " strong")
    least = y + LINE
  end
end

local function points_of(epochs, name)
  local list = {}
  for _, event in ipairs(epochs) do
    if event[name] then list[#list + 1] = {event.step, event[name], event.epoch} end
  end
  return list
end

local function dots(out, class, points)
  for i, p in ipairs(points) do
    if p and (#points < MANY or i == #points) then dot(out, class, p[1], p[2]) end
  end
end

-- If the loss is nan from some step to the end, marks that step.
local function mark_nan(out, run, x)
  local n = #run.losses
  local first = n + 1
  while first > 1 and not run.losses[first - 1] do first = first - 1 end
  if first > n then return end
  local at = x(run.steps[first])
  local left = at < (LEFT + RIGHT) / 2
  segment(out, "dotted", at, LOSS.top, at, LOSS.bottom)
  label(out, at + (left and 8 or -8), LOSS.top + 14,
        "nan from step " .. thousands(run.steps[first]), left and "nan" or "nan end")
end

local function loss_panel(out, run, x)
  local raw, even = thin(run.steps, run.losses)
  local test = points_of(run.epochs, "test_loss")
  local low, high, labels = math.huge, -math.huge, {}
  for _, shown in ipairs{{raw, 100}, {even, math.huge}, {test, math.huge}} do
    local least, most = range(table.unpack(shown))
    low, high = math.min(low, least or low), math.max(high, most or high)
  end
  if low > high then low, high = 0, 1 end
  local y, ticks = loss_scale(low, high, LOSS)
  y_axis(out, LOSS, y, ticks, function(value) return ("%.6g"):format(value) end)
  label(out, LEFT, LOSS.top - 14, "Loss", "strong")
  line(out, "raw", placed(raw, x, y, LOSS))
  for _, item in ipairs{{"train", even}, {"test", test}} do
    local class, points = table.unpack(item)
    local pixels, last = placed(points, x, y, LOSS), points[#points]
    line(out, class, pixels)
    if class == "test" or #points == 1 then dots(out, class, pixels) end
    if last then
      labels[#labels + 1] = {pixels[#pixels], ("%s %.3f"):format(class, last[2]), class}
    end
  end
  end_labels(out, labels)
  mark_nan(out, run, x)
end

local function top1_panel(out, points, x)
  local least, most = range(points, math.huge)
  local y, ticks = top1_scale(least, most, TOP1)
  y_axis(out, TOP1, y, ticks, function(value) return ("%.4g %%"):format(100 * value) end)
  label(out, LEFT, TOP1.top - 14, "Top-1 of the test set", "strong")
  local pixels, last = placed(points, x, y, TOP1), points[#points]
  line(out, "top1", pixels)
  dots(out, "top1", pixels)
  local found = last[2] == most        -- only the first of equal best points has a label
  for i, p in ipairs(points) do
    local best = p[2] == most and not found
    found = found or best
    if i < #points and (#points <= FEW or best) then
      local text = ("%.2f"):format(100 * p[2])
      if #points > FEW then text = ("best %s, epoch %d"):format(text, p[3]) end
      label(out, pixels[i][1], pixels[i][2] - 8, text, "middle")
    end
  end
  end_labels(out, {{pixels[#pixels], ("top-1 %.2f %%"):format(100 * last[2]), "top1"}})
end

-- The x axis, in epochs if the run has several, else in steps.
local function x_axis(out, run, bottom, x)
  local last, n, each, name = run.steps[#run.steps], run.steps[#run.steps], 1, "step"
  local epoch = run.epochs[#run.epochs]
  if epoch and epoch.epoch > 1 then
    each, name = epoch.step / epoch.epoch, "epoch"
    n = last / each
  end
  for _, value in ipairs(multiples(0, n, math.max(1, tick_step(n, 4)))) do
    local at = x(value * each)
    segment(out, "axis", at, bottom, at, bottom + 4)
    label(out, at, bottom + 18, thousands(value), "middle")
  end
  label(out, RIGHT + 20, bottom + 18, name)
end

-- Returns the SVG text for the events of a run. events: an iterator from log.read().
function plot.curves(events, title)
  local run = gather(events)
  local top1 = points_of(run.epochs, "top1")
  local bottom = (top1[1] and TOP1 or LOSS).bottom
  local height, n = bottom + BELOW, run.steps[#run.steps]
  local out = {
    ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">')
      :format(WIDTH, height, WIDTH, height),
    "<style>" .. STYLE .. "</style>",
    ('<rect class="back" width="%d" height="%d"/>'):format(WIDTH, height),
  }
  label(out, LEFT, 32, title, "title")
  if not n then
    label(out, LEFT, LOSS.top, "no step was taken")
  else
    local x = linear(0, n, LEFT, RIGHT)
    loss_panel(out, run, x)
    if top1[1] then top1_panel(out, top1, x) end
    x_axis(out, run, bottom, x)
  end
  out[#out + 1] = "</svg>\n"
  return table.concat(out, "\n")
end

plot.curves = core.in_c_locale(plot.curves)

return plot
