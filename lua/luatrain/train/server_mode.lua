-- server_mode.lua - runs with a synchronous parameter server, --parallel sync-server: synchronous
-- training, in which rank 0 sums the gradients; see dist/server_sum.h. With --simulate, one process
-- trains on whole batches, and a virtual clock counts the time that the workers and the server
-- would take. mode.lua describes the methods.

local core = ...
local command_line = require "luatrain.command_line"
local Mode = require "luatrain.train.mode"
local read_options = require "luatrain.train.parallel".server
local shares_text = require "luatrain.train.async_report".shares_text

local Server = setmetatable({}, Mode)
Server.__index = Server

local simulated = 0                    -- number of simulated runs that are open

-- Called before a loop over shuffled batches that is not one of lt.run. EUSAGE in a simulation:
-- only a run counts its time.
function Server.check_loop()
  local o = read_options()
  if o and o.workers and simulated == 0 then
    core.fail("EUSAGE", "--simulate with --parallel sync-server requires lt.run or lt.fit, which "
                        .. "count the time")
  end
end

-- The mode of a run with settings `run`, or nil if it has no such server.
function Server.of(run)
  local o = read_options()
  if not o then return nil end
  if o.workers and run.amp == "auto" then
    core.fail("EUSAGE", "amp = auto cannot be combined with --simulate; choose off, bf16 or fp16")
  end
  return setmetatable({
    options = o,
    clock = false,               -- of a simulation
    time = 0.0, first_time = 0.0, first_step = 0,     -- its time, and the start of this process
  }, Server)
end

local BYTES = {f64 = 8, f32 = 4, f16 = 2, bf16 = 2}

-- The bytes of the gradients of a net as they travel with --wire.
local function wire_bytes(net)
  local bytes, wire = 0, command_line.variable "LUATRAIN_WIRE"
  local f32 = (wire == "fp16" or wire == "bf16") and 2 or 4
  for _, x in ipairs(net:parameters()) do
    bytes = bytes + x:count() * (x.dtype == "f32" and f32 or BYTES[x.dtype])
  end
  return bytes
end

function Server:open(saved)
  local run, o = self.run, self.options
  if not o.workers then return end
  simulated = simulated + 1
  self.time = saved and saved.numbers.time or 0.0
  self.first_time, self.first_step = self.time, run.steps
  self.clock = core.server_clock(o, wire_bytes(run.settings.net), self.time)
end

function Server:add_start_fields(fields)
  fields.rule, fields.workers = "sync-server", self.options.workers
end

function Server:print_start()
  self.run.log:note(self.clock and "a simulated synchronous parameter server"
                    or "a synchronous parameter server on rank 0")
end

function Server:virtual_time()
  if not self.clock then return nil end
  self.time = self.clock:step(self.run.steps)
  return self.time
end

function Server:close()
  if self.clock then simulated = simulated - 1 end
end

function Server:numbers() return self.clock and {time = self.time} or {} end

-- Logs and prints the simulated rate.
function Server:report(exit)
  local run, n = self.run, self.run.steps - self.first_step
  if not self.clock or n == 0 or not exit then return end
  local busy, link, queue = self.clock:stats()
  local fields = {step = run.steps, steps_per_s = n / (self.time - self.first_time),
                  server_busy = busy, link_share = link, queue_share = queue}
  run.log:event("server", fields)
  run.log:note(shares_text(fields))
end

return Server
