-- async_svg.lua - draws accuracies after each epoch as an SVG, one line per rule. The SVG adapts to
-- light and dark mode.
--
--   local svg = dofile "async_svg.lua"(title, {{name = "ddc", color = 1, values = {85.1, 88.4}}})

local WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 620, 60, 370
local LINE = 15                        -- smallest distance between two labels, in pixels
local COLORS = {"#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf8700", "#0f8b8d", "#d1242f",
                "#6e7781"}

local STYLE = [[
text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#59636e}
.back{fill:#fff}.title{font-size:16px;font-weight:600;fill:#1f2328}.end{text-anchor:end}
.middle{text-anchor:middle}path{fill:none;stroke-linejoin:round;stroke-width:2}
.grid{stroke:#e7eaee;stroke-width:1}
@media(prefers-color-scheme:dark){text{fill:#9198a1}.back{fill:#0d1117}.title{fill:#f0f6fc}
.grid{stroke:#21262d}}]]

local function range(series)
  local low, high, n = math.huge, -math.huge, 0
  for _, s in ipairs(series) do
    for _, value in ipairs(s.values) do low, high = math.min(low, value), math.max(high, value) end
    n = math.max(n, #s.values)
  end
  return low, high, n
end

-- title: a string without special characters. series: a list of {name =, color = 1 to 8,
-- values = accuracies in percent, one per epoch}; a line may be shorter than others.
-- Returns the text of the SVG.
return function(title, series)
  local low, high, n = range(series)
  local step = high - low > 20 and 10 or high - low > 8 and 5 or 2
  low, high = step * math.floor(low / step), step * (math.floor(high / step) + 1)
  local function x(epoch) return LEFT + (epoch - 1) / math.max(n - 1, 1) * (RIGHT - LEFT) end
  local function y(value) return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP) end
  local out = {
    ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">')
      :format(WIDTH, HEIGHT, WIDTH, HEIGHT),
    "<style>" .. STYLE .. "</style>",
    ('<rect class="back" width="%d" height="%d"/>'):format(WIDTH, HEIGHT),
    ('<text class="title" x="%d" y="32">%s</text>'):format(LEFT, title)}
  local function add(...) out[#out + 1] = string.format(...) end
  for value = low, high, step do
    add('<path class="grid" d="M%d %.1fL%d %.1f"/>', LEFT, y(value), RIGHT, y(value))
    add('<text class="end" x="%d" y="%.1f">%d %%</text>', LEFT - 8, y(value) + 4, value)
  end
  for epoch = 1, n do
    add('<text class="middle" x="%.1f" y="%d">%d</text>', x(epoch), BOTTOM + 20, epoch)
  end
  add('<text x="%d" y="%d">epoch</text>', RIGHT + 12, BOTTOM + 20)
  local labels = {}
  for i, s in ipairs(series) do
    local color, points = COLORS[s.color], {}
    for epoch, value in ipairs(s.values) do
      points[epoch] = ("%.1f %.1f"):format(x(epoch), y(value))
    end
    add('<path style="stroke:%s" d="M%s"/>', color, table.concat(points, "L"))
    local last = s.values[#s.values]
    labels[i] = {y = y(last) + 4, text = ("%s %.1f"):format(s.name, last), color = color}
  end
  table.sort(labels, function(a, b) return a.y < b.y end)
  local least = 0
  for _, l in ipairs(labels) do
    least = math.max(l.y, least)
    add('<text style="fill:%s" x="%d" y="%.1f">%s</text>', l.color, RIGHT + 12, least, l.text)
    least = least + LINE
  end
  out[#out + 1] = "</svg>\n"
  return table.concat(out, "\n")
end
