-- log.lua - the log of a run: metrics.jsonl, with a JSON object per line, and text for people: a
-- live line on a terminal, or plain lines in a pipe.
--
--   local log = require "luatrain.train.log".new{folder = "runs/x"}
--   log:step{step = 7, epoch = 1, epochs = 5, steps = 2345, samples = 896, loss = 0.3, ...}
--   log:epoch{epoch = 1, epochs = 5, loss = 0.3, top1 = 0.9, ...}
--   log:close()
--
-- Each line of the file is written with one system call, so that a killed run leaves at most its
-- last line torn. While a log is open, print clears the live line first.

local core = ...
local check = require "luatrain.check"
local json_text = require "luatrain.json".text
local thousands = require "luatrain.thousands"

local log = {}
local Log = {}
local meta = {__index = Log, __name = "luatrain.Log"}

local PLAIN, LIVE = 10, 0.1    -- seconds between plain lines; between updates of the live line
local FADE = 30                -- time constant of the rate's exponential mean, in seconds

-- ==== JSON =======================================================================================

-- The fields in the order of a line; other fields follow, sorted by name. A format limits the
-- digits of measured values to the significant ones. Some apply to one event only, because a script
-- may report a number of the same name.
local FIELDS = {
  {"step"}, {"epoch"}, {"samples"}, {"loss"}, {"lr"}, {"top1"}, {"test_loss"},
  {"samples_per_s", "%.3f"}, {"data", "%.4f", "step"}, {"forward", "%.4f", "step"},
  {"backward", "%.4f", "step"}, {"weights", "%.4f", "step"}, {"waiting", "%.4f", "step"},
  {"stages"}, {"exposed_comm", "%.4f", "step"}, {"optimizer", "%.4f", "step"},
  {"other", "%.4f", "step"}, {"wire_bytes"}, {"scale"},
  {"skipped"}, {"headroom"}, {"version"}, {"script"}, {"folder"}, {"device"}, {"backend"},
  {"ranks"}, {"share"}, {"workers"}, {"rule"}, {"threads"}, {"amp"}, {"seed"}, {"parameters"},
  {"images"}, {"height"}, {"width"}, {"channels"}, {"classes"}, {"target"}, {"batch"}, {"epochs"},
  {"steps"}, {"path"}, {"text"}, {"mean_delay", "%.3f", "async"}, {"steps_per_s", "%.6g"},
  {"server_busy", "%.4f"}, {"link_share", "%.4f"}, {"queue_share", "%.4f"},
  {"wall_s", "%.3f"}, {"device_hours", "%.6g", "end"}, {"target_epoch"},
  {"target_device_hours", "%.6g", "end"}, {"peak_rss_bytes"}, {"weights_sha256"}, {"failed_saves"},
  {"exit"},
}

local known = {}
for _, field in ipairs(FIELDS) do
  field.key = (',"%s":'):format(field[1])
  known[field[1]] = true
end

local function value_text(value, format)
  local measured = format and math.type(value) == "float" and value - value == 0
  return measured and format:format(value) or json_text(value)
end

-- The line for an event. t: seconds since the run began. Leaves out the fields in `omitted`.
local line_of = core.in_c_locale(function(name, t, fields, omitted)
  local items, n = {('{"event":%s,"t":%.3f'):format(json_text(name), t)}, 1
  for i = 1, #FIELDS do
    local field = FIELDS[i]
    local value = fields[field[1]]
    if value ~= nil and not omitted[field[1]] then
      local format = (field[3] or name) == name and field[2]
      items[n + 1], items[n + 2] = field.key, value_text(value, format)
      n = n + 2
    end
  end
  local others = {}
  for key in pairs(fields) do
    if not known[key] then others[#others + 1] = key end
  end
  table.sort(others)
  for _, key in ipairs(others) do
    items[#items + 1] = "," .. json_text(key) .. ":" .. json_text(fields[key])
  end
  items[#items + 1] = "}\n"
  return table.concat(items)
end)

-- ==== Reading ====================================================================================

-- Lines are read with patterns that rely on the format of line_of(). Quotes in strings are escaped,
-- so a match for `"step":` is never inside a string. A torn line does not end with "}\n".
local function is_whole(line) return line:sub(-2) == "}\n" end
local function step_in(line) return tonumber(line:match '"step":(%d+)') or 0 end

-- Iterates over the lines of a file, including line ends. Raises an error if the file is not
-- readable or not a regular file; a FIFO does not block. Uses error(), because core.fail() in a
-- pcall while a run ends would hide the exit code of the error that ended it.
function log.lines(path)
  local file, why = core.open_plain(path, "r")
  if not file then
    error("cannot read " .. (why or path .. ": No such file or directory"), 0)
  end
  return function()
    local line, failed = file:read "L"
    if failed then error(("cannot read %s: %s"):format(path, failed), 0) end
    if not line then file:close() end
    return line
  end
end

-- Iterates over the events of a file. Each event is a table with its name, `event`, its numbers and
-- `amp`, if it has that.
function log.read(path)
  local lines = log.lines(path)
  return function()
    local line = lines()
    while line and not is_whole(line) do line = lines() end
    if not line then return nil end
    local event = {event = line:match '^{"event":"([^"]*)"', amp = line:match '"amp":"(%l+%d*)"'}
    for key, number in line:gmatch '"([%w_]+)":(-?%d[%d.e+-]*)' do event[key] = tonumber(number) end
    return event
  end
end

-- The number of bytes before the first line that log.cut() removes; nil if it removes none.
local function bytes_before(path, step, epoch)
  local bytes = 0
  for line in log.lines(path) do
    local reported = tonumber(line:match '^{"event":"epoch".-"epoch":(%d+)') or 0
    local after = is_whole(line) and (step_in(line) > step or reported >= epoch)
    if after or line:sub(-1) ~= "\n" then return bytes end
    bytes = bytes + #line
  end
end

-- Truncates the file at a position, for a run that resumes there: removes the steps after it and
-- the reports of unfinished epochs, which will be written again, and a torn last line. A torn line
-- in the middle, from a time when the disk was full, stays.
function log.cut(path, step, epoch)
  if core.exists(path) == false then return end
  local ok, bytes = pcall(bytes_before, path, step, epoch)
  if not ok then core.fail("EENV", bytes) end
  if bytes then core.cut_file(path, bytes) end
end

-- ==== Text for people ============================================================================

-- "51 s", "3:12", "2:05:10", "31688.1 years"
function log.duration(seconds)
  if seconds > 1e9 then return ("%.6g years"):format(seconds / (365.25 * 86400)) end
  local s = math.floor(seconds + 0.5)
  if s < 60 then return ("%d s"):format(s) end
  if s < 3600 then return ("%d:%02d"):format(s // 60, s % 60) end
  return ("%d:%02d:%02d"):format(s // 3600, s // 60 % 60, s % 60)
end

local function short(value)
  local size = math.abs(value)
  if size >= 1e4 then return ("%.3g"):format(value) end
  if size > 0 and size < 0.01 then return ("%.2g"):format(value) end
  return value ~= value and "nan" or ("%.3f"):format(value)
end

local function rate_text(rate)
  return (rate < 10 and ("%.1f"):format(rate) or thousands(rate)) .. " img/s"
end

local function counted(n, one, many) return thousands(n) .. " " .. (n == 1 and one or many) end

-- Joins the parts of a line. Leaves out false and nil.
local function joined(...)
  local list, parts = {}, table.pack(...)
  for i = 1, parts.n do
    if parts[i] then list[#list + 1] = parts[i] end
  end
  return table.concat(list, "  ")
end

-- The text at the start of a run, from the fields of its event "start". f.step and f.epoch are set
-- only if it resumes.
log.start_text = core.in_c_locale(function(f)
  return joined("luatrain " .. f.version, f.device, f.backend,
                f.ranks > 1 and counted(f.ranks, "rank", "ranks"),
                counted(f.threads, "thread", "threads") .. (f.ranks > 1 and " each" or ""),
                f.amp ~= "off" and f.amp, "seed " .. f.seed, "run " .. f.folder)
    .. "\n"
    .. joined(counted(f.parameters, "parameter", "parameters"),
              ("%s %dx%dx%d, %s"):format(counted(f.images, "image", "images"), f.height, f.width,
                                         f.channels, counted(f.classes, "class", "classes")),
              "batch " .. f.batch .. (f.share and ", shares " .. table.concat(f.share, ",") or ""),
              counted(f.epochs, "epoch", "epochs") .. " = " .. counted(f.steps, "step", "steps"),
              f.step and ("resumed: step %d"):format(f.step)
              .. (f.epoch and (", epoch %d"):format(f.epoch) or ""))
end)

local step_text = core.in_c_locale(function(f, rate, eta, without)
  -- workers of asynchronous training may be ahead of the epoch
  local percent = math.min(100 * (f.samples - (f.epoch - 1) * f.images) // f.images, 100)
  return joined(
    ("epoch %d/%d"):format(f.epoch, f.epochs), ("%d %%"):format(percent),
    not without.step and ("step %d/%d"):format(f.step, f.steps), "loss " .. short(f.loss),
    not without.lr and "lr " .. short(f.lr),
    f.skipped and f.skipped > 0 and not without.scale
    and ("scale %.14g skipped %d"):format(f.scale, f.skipped), not without.rate and rate_text(rate),
    eta and "eta " .. log.duration(eta))
end)

local IN_EPOCH_LINE = {epoch = true, epochs = true, step = true, samples = true, loss = true,
                       test_loss = true, size = true, samples_per_s = true, wall_s = true}

local epoch_text = core.in_c_locale(function(f, remark)
  local tops, others = {}, {}
  for name, value in pairs(f) do
    if name:find "^top%d+$" then
      tops[#tops + 1] = ("%s %.2f %%"):format(name, 100 * value)
    elseif not IN_EPOCH_LINE[name] and type(value) == "number" then
      others[#others + 1] = name .. " " .. short(value)
    end
  end
  table.sort(tops)
  table.sort(others)
  return joined(
    ("epoch %d/%d"):format(f.epoch, f.epochs), f.size and ("size %d"):format(f.size),
    "loss " .. short(f.loss), tops[1] and table.concat(tops, "  "),
    f.test_loss and "test loss " .. short(f.test_loss), others[1] and table.concat(others, "  "),
    remark, rate_text(f.samples_per_s), log.duration(f.wall_s))
end)

-- ==== The log of a run ===========================================================================

-- The line that print(...) would write.
function log.line(...)
  local list = table.pack(...)
  for i = 1, list.n do list[i] = tostring(list[i]) end
  return table.concat(list, "\t") .. "\n"
end

-- In mode json, stdout is for programs only.
local function print_to_stderr(...) io.stderr:write(log.line(...)) end

local spec = check "log.new{folder:string; mode=text, quiet=false, seconds=0.0}"

-- Opens a log that appends to folder/metrics.jsonl. In mode "json", every line of the file also
-- goes to stdout, no other text does, and print writes to stderr. seconds: the run's time before it
-- was resumed.
function log.new(given)
  local self = spec(given)
  local path = self.folder .. "/metrics.jsonl"
  local file, why = core.open_plain(path, "a")
  if not file then core.fail("EENV", "cannot write " .. why) end
  file:setvbuf "no"
  self.file, self.path, self.began, self.shown = file, path, core.clock() - self.seconds, -math.huge
  self.text = self.mode == "text" and not self.quiet
  self.json = self.mode == "json" and not self.quiet
  self.live = self.text and core.terminal() ~= nil
  self.width = 0                                         -- width of the live line on the terminal
  self.images, self.seconds = 0, 0                       -- exponentially weighted sums over steps
  self.print = print
  self.own_print = function(...)
    self:clear()
    if self.mode == "json" then print_to_stderr(...) else self.print(...) end
  end
  print = self.own_print
  return setmetatable(self, meta)
end

-- Clears the live line.
function Log:clear()
  if self.width > 0 then io.stdout:write("\r", (" "):rep(self.width), "\r"):flush() end
  self.width = 0
end

local function say(self, text)
  self:clear()
  io.stdout:write(text, "\n"):flush()
end

local function print_warning(self, text)
  self:clear()
  io.stderr:write("luatrain: warning: ", text, "\n")
end

local NOTHING, NOT_IN_EPOCH = {}, {epochs = true}        -- fields that lines leave out
local NOT_IN_STEP = {epochs = true, steps = true, images = true, batch = true}

-- Writes an event to the file. Returns its line.
local function record(self, name, fields, omitted)
  local line = line_of(name, core.clock() - self.began, fields, omitted)
  local done, why = self.file:write(self.torn and "\n" or "", line)
  self.torn = not done
  if not done and not self.warned then
    self.warned = true
    print_warning(self, ("cannot write %s: %s; training continues"):format(self.path, why))
  end
  return line
end

-- Writes an event. fields: strings, numbers, booleans and lists of these, by name.
function Log:event(name, fields)
  local line = record(self, name, fields, NOTHING)
  if self.json then io.stdout:write(line):flush() end
end

function Log:note(text)
  if self.text then say(self, text) end
end

function Log:warn(text)
  self:event("warn", {text = text})
  print_warning(self, text)
end

-- Writes the event "start", and prints its text.
function Log:start(fields)
  self:event("start", fields)
  self:note(log.start_text(fields))
end

-- Returns the rate over the last steps, in images per second, and the remaining seconds, or
-- nil at the first step. Time between steps (an evaluation, say) does not count.
local function count(self, f)
  local first = not self.counting                        -- the first step is slow: not counted
  self.counting = true
  if first then return f.samples_per_s end
  local seconds = f.batch / f.samples_per_s
  local fade = math.exp(-seconds / FADE)
  self.images, self.seconds = self.images * fade + f.batch, self.seconds * fade + seconds
  local rate = self.images / self.seconds
  return rate, (1.0 * f.epochs * f.images - f.samples) / rate
end

local function draw(self, f, rate, eta)
  local width, without = (core.terminal() or 80) - 1, {}   -- the last column would wrap
  local text = step_text(f, rate, eta, without)
  for _, name in ipairs{"lr", "rate", "step", "scale"} do  -- drops the least important first
    if #text <= width then break end
    without[name] = true
    text = step_text(f, rate, eta, without)
  end
  text = text:sub(1, math.max(width, 0))
  io.stdout:write("\r", text, (" "):rep(math.min(self.width, width) - #text)):flush()
  self.width = #text
end

-- Writes the event of a step and shows it if due. fields.epochs and fields.steps are totals of the
-- run. samples: seen so far, over all epochs; images: per epoch; batch: samples in this step;
-- samples_per_s: the rate of this step, including the wait for its data.
function Log:step(fields)
  local line = record(self, "step", fields, NOT_IN_STEP)
  local rate, eta = count(self, fields)
  local now = core.clock()
  if self.json then io.stdout:write(line):flush() end
  local last = self.live and fields.samples % fields.images == 0          -- last step of its epoch
  if not last and now < self.shown + (self.live and LIVE or PLAIN) then return end
  self.shown = now
  if self.live then
    draw(self, fields, rate, eta)
  elseif self.text then
    say(self, step_text(fields, rate, eta, NOTHING))
  end
end

-- Writes and shows the end of an epoch. fields: loss, samples_per_s and wall_s of its training;
-- top1, test_loss and other numbers of the evaluation, if there was one. remark: text that is only
-- shown, or nil.
function Log:epoch(fields, remark)
  local line = record(self, "epoch", fields, NOT_IN_EPOCH)
  if self.json then io.stdout:write(line):flush() end
  self:note(epoch_text(fields, remark))
end

-- Closes the file and restores print. Further calls do nothing.
function Log:close()
  self:clear()
  if print == self.own_print then print = self.print end
  local done, why = self.file:close()
  if not done then print_warning(self, ("cannot write %s: %s"):format(self.path, why)) end
  self.close = function() end
end

-- The log of ranks other than 0: shows warnings only, with print.
local Other = {}
for _, name in ipairs{"start", "step", "epoch", "event", "note", "close"} do
  Other[name] = function() end
end
function Other.warn(_, text) print("warning: " .. text) end

function log.other() return setmetatable({}, {__index = Other}) end

-- In mode json, stdout is for programs before the first run and after the last one too.
if os.getenv "LUATRAIN_LOG" == "json" then print = print_to_stderr end

return log
