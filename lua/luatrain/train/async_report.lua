-- async_report.lua - what an asynchronous run logs and prints about its server and its delays, and
-- the result of an evaluation on other ranks. self: see async.lua.

local core = ...
local command_line = require "luatrain.command_line"
local metrics = require "luatrain.api.metrics"
local text_of = command_line.variable

local report = {}

-- Delays 0, 1, 2-3, 4-7, ... are counted in bins 1, 2, 3, 4, ...
local function bin_of(delay)
  local bin = 1
  while delay > 0 do bin, delay = bin + 1, delay // 2 end
  return bin
end

function report.count_delay(self, delay)
  local bin = bin_of(delay)
  self.delays[bin] = (self.delays[bin] or 0) + 1
  self.total_delay = self.total_delay + delay
  self.largest_delay = math.max(self.largest_delay, delay)
end

-- 1060000000 as "1.06 GB".
local function bytes_text(bytes)
  for _, unit in ipairs{{1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}} do
    if bytes >= 0.9995 * unit[1] then return ("%.3g %s"):format(bytes / unit[1], unit[2]) end
  end
  return ("%d B"):format(bytes)
end

-- Sends a note to luatrain launch, if that has started this process: see tools/serve.c.
local function tell_launch(...)
  if text_of "LUATRAIN_LAUNCH" then io.stderr:write("\30" .. string.format(...) .. "\n") end
end

-- Prints how much memory the server takes, at the start.
function report.print_start(self)
  local bytes, text = self.handle:stats(1), "asynchronous training with " .. self.rule
  if bytes > 0 then
    text = ("%s; the server takes %s per worker"):format(text, bytes_text(bytes))
  end
  self.run.log:note(text)
  if not self.is_elastic then return end
  local key = text_of "LUATRAIN_KEY" or self.run.folder .. "/join.key"
  local address = core.write_key(key)
  self.run.log:note("workers join with: " .. command_line.join_line(address, key))
  tell_launch("join %s %s", address, key)
end

-- The warning about a rank that has failed or called os.exit(0), or that sent rank 0 no message for
-- too long.
function report.loss_text(event)
  if event.host ~= "" then
    return ("worker %d on %s was %s; its batches are given to others, and training continues")
           :format(event.worker, event.host, event.timed_out and "silent for too long" or "lost")
  end
  return ("rank %d %s; its batches are given to other ranks, and training continues"):format(
    event.worker, event.timed_out and "was silent for too long" or "has failed or left")
end

-- Prints that a worker was lost or has joined. The log has the number of ranks from then on, if
-- workers join the job.
function report.change(self, event)
  local joined = event.kind == "joined"
  if joined then
    self.run.log:note(("worker %d on %s joined"):format(event.worker, event.host))
  else
    self.run.log:warn(report.loss_text(event))
  end
  if not self.is_elastic then return end
  self.present = self.present + (joined and 1 or -1)
  self.run.log:event(event.kind,
                     {worker = event.worker, host = event.host, ranks = self.present})
  if event.timed_out then tell_launch("silent %d", event.worker) end
end

-- The rate of a simulation with links, and how it spends its time, as a line of text.
function report.shares_text(fields)
  return ("%.4g steps per second; workers wait %.0f %% of the time for links and %.0f %% for the "
          .. "server, which is busy for %.0f %%"):format(
         fields.steps_per_s, 100 * fields.link_share, 100 * fields.queue_share,
         100 * fields.server_busy)
end

-- Logs and prints delays and compensation, at the end.
function report.finish(self, exit)
  local run, n = self.run, self.run.steps
  if n == 0 or not exit then return end
  local _, wire_bytes, strength, capped, server_busy, link_share, queue_share =
    self.handle:stats(2 * #run.settings.optim.groups)
  local bins = {}
  for bin = 1, bin_of(self.largest_delay) do bins[bin] = self.delays[bin] or 0 end
  local compensates = self.rule == "ddc"
  local fields = {
    step = n, delays = bins, mean_delay = self.total_delay / n, largest_delay = self.largest_delay,
    dropped = self.dropped, strength = compensates and strength or nil,
    capped = compensates and capped or nil}
  if self.is_live then
    fields.steps_per_s = (n - self.first_step) / (core.clock() - self.began)
    fields.wire_bytes, fields.server_busy = wire_bytes, server_busy
  elseif not self.is_replay and self.first_time and self.time > self.first_time then
    fields.steps_per_s = (n - self.first_step) / (self.time - self.first_time)
    if self.options.has_messages then
      fields.server_busy, fields.link_share, fields.queue_share = server_busy, link_share,
        queue_share
      run.log:note(report.shares_text(fields))
    end
  end
  run.log:event("async", fields)
  run.log:note(("delays: %.1f steps on average, at most %d%s"):format(
    fields.mean_delay, self.largest_delay,
    self.dropped > 0 and ("; %d gradients were dropped"):format(self.dropped) or ""))
end

-- The result of run:evaluate on ranks other than 0, which do not evaluate: nan under each name that
-- the result of rank 0 may have.
function report.no_result(given)
  local result = {loss = core.nan, cross_entropy = core.nan}
  for _, metric in ipairs(metrics.read(given and given.metrics, "run:evaluate")) do
    result[metric.name] = core.nan
  end
  return result
end

return report
