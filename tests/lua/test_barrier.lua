-- test_barrier.lua - lt.barrier in one process and in each mode of several ranks: rank 0 prepares a
-- file that all ranks read.
local T = require "lt_test"

local folder = T.folder [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{where = {"before", "within", "root", "alone"}}
lt.on_root(function()
  if io.open "prepared" then return end
  os.execute "sleep 0.5"
  local file <close> = io.open("prepared", "w")
  file:write "3"
end)
if opt.where == "root" then lt.on_root(lt.barrier) end
if opt.where ~= "alone" or lt.rank() == 0 then lt.barrier() end
local file <close> = io.open "prepared"
assert(opt.where == "alone" or file:read "a" == "3")
local train = lt.data.open "synthetic:8x8x2/3/48"
local net = nn.sequential{flatten = nn.flatten(), fc1 = nn.linear{128, 8}, fc2 = nn.linear{8, 3}}
local sgd = lt.optim.sgd(net, {lr = 0.05})
do
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 1, batch = 16}
  for _ in run:epochs() do
    for x, y in run:batches() do
      run:step(function()
        local loss = lt.cross_entropy(net(x), y)
        loss:backward()
        sgd:step()
        return loss
      end)
      if opt.where == "within" then lt.barrier() end
    end
  end
end
lt.barrier()
]]

local function ends(options, where, code, message)
  os.execute(("rm -rf %s/runs %s/prepared"):format(folder, folder))
  T.ends(folder, ("--quiet --threads 1 %s t.lua --where %s"):format(options, where), code, message)
end

local MODES = {"", "--ranks 2", "--ranks 2 --deterministic --vranks 4",
               "--ranks 2 --parallel pipe=2,micro=2,cut=fc2", "--ranks 2 --parallel pipe=2",
               "--ranks 2 --parallel async=asgd"}

T.test("all ranks wait for the barrier", function()
  for _, options in ipairs(MODES) do ends(options, "before", 0, "") end
end)

T.test("a barrier between steps", function()
  for i = 1, 4 do ends(MODES[i], "within", 0, "") end
  ends(MODES[6], "within", 1, "t.lua:27: lt.barrier: in asynchronous training, ranks do not wait "
       .. "for each other; call it before the run or after its end")
end)

T.test("a barrier that not all ranks reach", function()
  for _, options in ipairs{"", "--ranks 2"} do
    ends(options, "root", 1, "t.lua:10: lt.barrier requires all ranks, but lt.on_root runs on rank "
         .. "0 only")
  end
  ends("--ranks 2 --timeout 20", "alone", 9, "the ranks disagree: rank 0 is in the barrier for "
       .. "lt.barrier")
end)

T.finish()
