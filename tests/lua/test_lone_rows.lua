-- test_lone_rows.lua - the last batch of an epoch leaves one image to a rank, shard or micro-batch,
-- and batch norm sees 1x1 maps: lt.fit refuses before the first step, and lt.run warns.
local T = require "lt_test"

local folder = T.folder [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{n = 37, batch = 12, norm = "batch_norm", maps = 1, accumulate = 1, loop = false,
                    frozen = false, split = 1, left = false}
local train, test = lt.data.open("synthetic:8x8x2/3/" .. opt.n)
local size = 8 // opt.maps
local net = nn.sequential{
  conv = nn.conv2d{2, 8, size, stride = size}, norm = nn[opt.norm]{8, act = "relu"},
  flatten = nn.flatten(), fc = nn.linear{8 * opt.maps ^ 2 // 1, 3}}
if opt.frozen then nn.batch_norm = nil end
local sgd = lt.optim.sgd(net, {lr = 0.01})
if not opt.loop then
  lt.fit{net = net, optim = sgd, train = train, test = test, epochs = 2, batch = opt.batch,
         accumulate = opt.accumulate, out = "run"}
  return
end
local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = opt.batch,
                           out = "run"}
if opt.left then
  for _ in run:epochs() do
    for _ in run:batches() do break end
    break
  end
  getmetatable(run).__close(run)
  net(lt.zeros{2, 8, 8, 2})
  return
end
for _ in run:epochs() do
  for x, y in run:batches() do
    if opt.frozen then net.norm:eval() end
    run:step(function()
      local sum = 0
      for x_i, y_i, share in lt.micro_batches(opt.split, x, y) do
        local loss = lt.cross_entropy(net(x_i), y_i) * share
        loss:backward()
        sum = sum + loss:item()
      end
      sgd:step()
      return sum
    end)
  end
end
]]

local function ends(options, arguments, code, message)
  os.execute("rm -rf " .. folder .. "/run")
  return T.ends(folder, ("--quiet --threads 1 --timeout 20 %s t.lua %s"):format(options, arguments),
                code, message)
end

-- The number of steps that the run has logged, 0 if it has no log.
local function steps()
  local exists, list = pcall(T.events, folder .. "/run", "step")
  return exists and #list or 0
end

local TEXT = "batch_norm: the last batch of each epoch has %s, which leaves one value per channel, "
             .. "but training requires more; change the batch size, or use nn.group_norm"

local function refuses(options, arguments, what)
  ends(options, arguments, 1, "t.lua:13: net.norm " .. TEXT:format(what))
  T.equal({options, arguments, steps()}, {options, arguments, 0})
end

local function accepts(options, arguments)
  T.equal(ends(options, arguments, 0, ""), "")
end

T.test("lt.fit refuses before the first step", function()
  refuses("", "", "1 of the 37 images")
  refuses("--ranks 2", "--n 38", "2 of the 38 images for 2 ranks")
  refuses("--deterministic --vranks 4", "--n 40", "4 of the 40 images for shards")
  refuses("--ranks 2 --deterministic --vranks 4", "--n 39", "3 of the 39 images for 2 ranks and "
          .. "shards")
  refuses("", "--n 39 --accumulate 3", "3 of the 39 images for micro-batches")
  refuses("--ranks 2 --parallel pipe=2,micro=2,cut=fc", "--n 39", "3 of the 39 images for "
          .. "micro-batches")
  refuses("--ranks 2 --parallel async=asgd", "", "1 of the 37 images")
  refuses("--ranks 2", "--norm sync_batch_norm", "1 of the 37 images for 2 ranks")
end)

T.test("nets and batches that train to the end", function()
  for _, arguments in ipairs{"--n 38", "--maps 2", "--n 36"} do accepts("", arguments) end
  ends("--max-steps 3", "", 0, "")
  accepts("--ranks 2", "--n 39 --maps 2 --accumulate 4")
  accepts("--ranks 2", "--n 38 --norm sync_batch_norm")
  ends("--ranks 2 --parallel pipe=2,micro=2,cut=fc", "--n 40", 0, "")
  accepts("", "--loop --frozen")
  accepts("", "--loop --left")           -- before the first step, then uses the net
end)

T.test("lt.run warns, because its loop may end earlier", function()
  for _, arguments in ipairs{"--loop", "--loop --n 40 --split 4"} do
    local last = arguments:find "40" and 4 or 1
    local warning = TEXT:format(("%d of the %d images%s"):format(last, 36 + last, last == 4
                                and " for micro-batches" or ""))
    local text = ends("", arguments, 1, "luatrain: warning: " .. warning)
    local at = text:find("luatrain: warning: " .. warning, 1, true)
    local failure = text:find("requires more than one value per channel", 1, true)
    assert(at and failure and at < failure, text)
    T.equal(select(2, text:gsub("the last batch of each epoch", "")), 1)
  end
end)

T.finish()
