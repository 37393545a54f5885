-- test_plot.lua - the SVG plot of a run is well-formed, and its points have the right coordinates.
require "luatrain"
local T = require "lt_test"
local plot = require "luatrain.train.plot"

-- The SVG of a list of events.
local function curves(events, title)
  local i = 0
  return plot.curves(function()
    i = i + 1
    return events[i]
  end, title or "a run")
end

local function step(i, loss) return {event = "step", step = i, epoch = 1, loss = loss} end
local function epoch(k, at, top1, test_loss)
  return {event = "epoch", step = at, epoch = k, top1 = top1, test_loss = test_loss}
end

-- A run with 9 steps per epoch.
local function run_of(epochs, top1)
  local events = {}
  for i = 1, 9 * epochs do
    events[#events + 1] = step(i, 2 + math.sin(i))
    if i % 9 == 0 then events[#events + 1] = epoch(i // 9, i, top1 and top1(i // 9)) end
  end
  return events
end

-- Checks that elements nest, attributes are quoted and special characters are escaped.
local function check_xml(svg)
  local open, rest = {}, svg
  while true do
    local text, slash, name, attributes, tail = rest:match "^([^<]*)<(/?)(%w+)([^<>]*)>(.*)$"
    if not text then break end
    assert(not text:find ">" or open[#open] == "style", text)
    assert(not text:gsub("&%a+;", ""):find "&", text)
    local empty = attributes:sub(-1) == "/"
    attributes = attributes:gsub("/$", ""):gsub(' [%w%-]+="[^"<]*"', "")
    T.equal(attributes, "")
    if slash == "/" then
      T.equal(table.remove(open), name)
    elseif not empty then
      open[#open + 1] = name
    end
    rest = tail
  end
  T.equal(#open, 0)
  T.equal(rest, "\n")
  for d in svg:gmatch ' d="([^"]*)"' do assert(d:find "^[ML%d%. ]+$", d) end   -- no nan, no inf
end

local function has(svg, text)
  if not svg:find(text, 1, true) then error("there is no " .. text .. " in\n" .. svg, 2) end
end
local function has_not(svg, text)
  if svg:find(text, 1, true) then error("there is " .. text .. " in\n" .. svg, 2) end
end

T.test("well-formed for any run", function()
  check_xml(curves{})
  check_xml(curves({step(1, 2.3)}, 'a <b> & "c"\n'))
  check_xml(curves{step(1, nil)})
  for _, title in ipairs{"gr\xfcn", "\xed\xa0\x80", "\xff\0\x7f"} do
    local svg = curves({step(1, 2.3)}, title)
    check_xml(svg)
    assert(utf8.len(svg), "it is not UTF-8")
  end
  has(curves({step(1, 2.3)}, "gr\u{fc}n"), "gr\u{fc}n")
  check_xml(curves{step(1, 0.0), step(2, 0.0)})
  check_xml(curves{step(1, -3.0), step(2, 1e30)})
  check_xml(curves(run_of(1, function() return 0.0 end)))
  check_xml(curves(run_of(5, function(k) return 1 - 0.5 ^ k end)))
  check_xml(curves(run_of(90, function(k) return 1 - 0.9 ^ k end)))
end)

T.test("points have the right coordinates", function()
  -- 4 steps over x = 60 to 640; losses 1 to 4 on an axis from 0 to 4, y = 288 to 78.
  local svg = curves{step(1, 4.0), step(2, 3.0), epoch(1, 2, 0.5, 2.0), step(3, 2.0), step(4, 1.0),
                     epoch(2, 4, 0.7, 2.0)}
  has(svg, '<path class="raw" d="M205 78L350 130.5L495 183L640 235.5"/>')
  has(svg, '<path class="train" d="M205 78L350 130.5L495 183L640 235.5"/>')
  has(svg, '<path class="test" d="M350 183L640 183"/>')
  has(svg, '<text x="650" y="239.5" class="train strong">train 1.000</text>')
  has(svg, '<text x="650" y="187" class="test strong">test 2.000</text>')
  has(svg, '<text x="52" y="134.5" class="end">3</text>')
  -- top-1 on an axis from 0.4 to 0.7 + a quarter of 0.26, y = 436 to 332.
  has(svg, '<path class="top1" d="M350 407.5L640 350.5"/>')
  has(svg, '<circle class="top1" cx="640" cy="350.5" r="3"/>')
  has(svg, '<text x="350" y="399.5" class="middle">50.00</text>')
  has(svg, '<text x="650" y="354.5" class="top1 strong">top-1 70.00 %</text>')
  -- the x axis counts epochs
  has(svg, '<text x="350" y="454" class="middle">1</text>')
  has(svg, '<text x="660" y="454">epoch</text>')
end)

T.test("one epoch has an axis of steps", function()
  local svg = curves(run_of(1, function() return 0.9 end))
  has(svg, ">step</text>")
  has_not(svg, ">epoch</text>")
end)

T.test("without an evaluation there is one panel", function()
  local svg = curves(run_of(2))
  has_not(svg, "Top-1")
  has(svg, 'height="336"')
end)

T.test("labels of lines that meet do not overlap", function()
  local svg = curves{step(1, 4.0), step(2, 2.0), epoch(1, 2, nil, 2.0)}
  local train = tonumber(svg:match 'y="([%d.]+)" class="train strong"')
  local test = tonumber(svg:match 'y="([%d.]+)" class="test strong"')
  T.near(math.abs(train - test), 15)
end)

T.test("a NaN loss leaves a gap, and gets a label if it persists", function()
  local events = {}
  for i = 1, 40 do events[i] = step(i, not (i == 10 or i > 30) and 2.0 + i % 2 or nil) end
  local svg = curves(events)
  has(svg, ">nan from step 31</text>")
  T.equal(select(2, svg:match '<path class="train" d="([^"]*)"':gsub("M", "")), 2)
  has_not(svg, "class=\"train strong\"")
end)

T.test("the last report of an epoch replaces earlier ones", function()
  local svg = curves{step(1, 1.0), epoch(1, 1, 0.5), epoch(1, 1, 0.6)}
  has(svg, ">top-1 60.00 %</text>")
  has_not(svg, ">50.00</text>")
end)

T.test("a loss that spans decades has a logarithmic axis", function()
  local svg = curves{step(1, 100.0), step(2, 10.0), step(3, 1.0)}
  has(svg, '<path class="raw" d="M253.3 78L446.7 183L640 288"/>')
  has(svg, ">50</text>")
end)

T.test("the plot of a long run keeps spikes, but not all points", function()
  local events = {}
  for i = 1, 100000 do events[i] = step(i, 1.0 + (i % 997) / 997 + (i == 31415 and 7 or 0)) end
  local svg = curves(events)
  assert(#svg < 12000, #svg)
  has(svg, " 78L")                       -- the spike reaches the top edge
end)

T.test("of several best epochs, only the first one has a label", function()
  local svg = curves(run_of(20, function(k) return (k == 13 or k == 14) and 0.9 or 0.5 end))
  has(svg, ">best 90.00, epoch 13</text>")
  has_not(svg, "epoch 14")
end)

T.test("with many epochs, only the best one has a label", function()
  local svg = curves(run_of(50, function(k) return k == 20 and 0.9 or 0.8 end))
  has(svg, ">best 90.00, epoch 20</text>")
  T.equal(select(2, svg:gsub("<circle", "")), 1)
end)

T.finish()
