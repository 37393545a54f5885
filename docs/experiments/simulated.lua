-- simulated.lua - a net with large messages and little computation, for the row c-simulator of
-- tools/reproduce. --sleep adds to the time of each batch. --times METRICS prints the options of
-- --simulate for a live run on two hosts whose metrics are given, and does not train.
local lt = require "luatrain"
local nn = lt.nn

local opt = lt.args{
  epochs = 5, sleep = 0.0, times = "", rate = 0.92,
  help = {sleep = "seconds to wait in each batch", times = "metrics.jsonl of a live run",
          rate = "Gbit/s that the link really carries"}}

-- The median of the seconds between two steps of rank 0, and the event "async".
local function read(path)
  local last, list, rates
  for line in io.lines(path) do
    local at = line:find '"worker":0' and tonumber(line:match '"time_s":([%d.e+-]+)')
    if at then
      list = list or {}
      if last then list[#list + 1] = at - last end
      last = at
    elseif line:find('{"event":"async"', 1, true) then
      rates = {steps = tonumber(line:match '"steps_per_s":([%d.e+-]+)'),
               busy = tonumber(line:match '"server_busy":([%d.e+-]+)')}
    end
  end
  table.sort(list)
  return list[#list // 2 + 1], rates
end

if opt.times ~= "" then
  local seconds, rates = read(opt.times)
  local service = rates.busy / rates.steps
  print(("delay=lognormal:0:%.6f,link=none,%g,server=%.6f"):format(seconds - service, opt.rate,
                                                                   service))
  return
end

local train, test = lt.data.open "synthetic:8x8x2/3/160"
local net = nn.sequential{nn.flatten(), nn.linear{128, 4096}, nn.relu(), nn.linear{4096, 512},
                          nn.relu(), nn.linear{512, 3}}
local sgd = lt.optim.sgd(net, {lr = 0.001})
local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = opt.epochs,
                           batch = 8}
for _ in run:epochs() do
  for x, y in run:batches() do
    run:step(function()
      if opt.sleep > 0 then os.execute(("sleep %g"):format(opt.sleep)) end
      local loss = lt.cross_entropy(net(x), y)
      loss:backward()
      sgd:step()
      return loss
    end)
  end
  run:report(run:evaluate(test))
end
