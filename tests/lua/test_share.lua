-- test_share.lua - --share: unequal shares of a batch change the result of a run only by rounding,
-- and --share auto gives a slow rank fewer images.

local T = require "lt_test"
local lt = require "luatrain"

-- The last batch of an epoch has 11 of 16 images. The running statistics of net.first depend only
-- on the data; its output is multiplied by 0, because batch norm uses the statistics of each
-- shard.
local folder = T.folder [[
local lt = require "luatrain"
local nn = lt.nn
local opt = lt.args{norm = "group_norm", batch = 16, accumulate = 1, epochs = 2, mixup = 0.0,
                    loop = false, own = false, two = false}
local train, test = lt.data.open "synthetic:8x8x1/4/75"
local body = nn.sequential{
  conv1 = nn.conv2d{1, 4, 3, pad = 1},
  norm = opt.norm == "group_norm" and nn.group_norm{2, 4} or nn[opt.norm]{4}, relu = nn.relu(),
  pool = nn.global_avg_pool2d(), drop = nn.dropout{0.2}, fc = nn.linear{4, 4}}
local net = nn.module({first = nn.batch_norm{1}, body = body}, function(self, x)
  return self.body(x + self.first(x) * 0)
end)
local function new_sgd(part) return lt.optim.sgd(part, {lr = 0.1, momentum = 0.9}) end
local sgd = opt.two and {new_sgd(body), new_sgd(net.first)} or new_sgd(net)
local function learn(x, y)
  local loss = lt.cross_entropy(net(x), y)
  loss:backward()
  sgd:step()
  return loss
end
if opt.own then
  for epoch = 1, opt.epochs do
    for x, y in train:batches{batch = opt.batch, shuffle = true, epoch = epoch} do
      lt.step(learn, x, y)
    end
  end
elseif opt.loop then
  local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = opt.epochs,
                             batch = opt.batch}
  for epoch in run:epochs() do
    local inner = train:batches{batch = 8, shuffle = true, epoch = epoch}
    for x, y in run:batches() do
      run:step(learn, x, y)
      local x = inner()                -- a pass of the script's own, while the shares change
      if x then lt.step(lt.no_grad, body.conv1, x) end
    end
    run:report(run:evaluate(test))
  end
else
  lt.fit{net = net, train = train, test = test, optim = sgd, epochs = opt.epochs,
         batch = opt.batch, accumulate = opt.accumulate, mixup = opt.mixup}
end
lt.save("w.safetensors", net)
]]

local function forget() assert(os.execute(("cd %s && rm -rf out w.safetensors"):format(folder))) end

-- Runs the script in the folder `out`, which may have a run to resume. Returns its output.
local function continue(options, flags, prefix)
  local text, code = T.run(folder, ("--threads 1 --timeout 20 --out out %s t.lua %s")
                                   :format(options, flags or ""), prefix)
  T.equal({options, code, code == 0 or text}, {options, 0, true})
  return text
end

local function train(...)
  forget()
  return continue(...)
end

-- All weights and buffers of the last run, and its losses.
local function result()
  local list, tensors = {}, lt.load(folder .. "/w.safetensors")
  local names = {}
  for name in pairs(tensors) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    for _, value in ipairs(tensors[name]:reshape({-1}):totable()) do list[#list + 1] = value end
  end
  return list
end

local function losses()
  local list = {}
  for _, event in ipairs(T.events(folder .. "/out", "step")) do list[#list + 1] = event.loss end
  for _, event in ipairs(T.events(folder .. "/out", "epoch")) do
    list[#list + 1], list[#list + 2], list[#list + 3] = event.loss, event.test_loss, event.top1
    T.equal(event.samples, event.epoch * 75)
  end
  return list
end

local function near(got, wanted, tolerance)
  T.equal(#got, #wanted)
  for i, value in ipairs(got) do T.near(value, wanted[i], tolerance) end
end

local function share_events() return T.events(folder .. "/out", "share") end
local function started() return T.events(folder .. "/out", "start") end

T.test("unequal shares give the same weights, losses and evaluations", function()
  local three = "--ranks 3 --share 1,5,2"
  for _, flags in ipairs{"", "--mixup 0.3", "--accumulate 3", "--loop",
                         "--norm sync_batch_norm"} do
    train("", flags)
    local weights, values = result(), losses()
    for _, options in ipairs(T.cases({"--ranks 2 --share 3,1", "--ranks 2 --share 1,100",
                                      "--ranks 2 --share 100,1", three}, {three})) do
      train(options, flags)
      near(result(), weights, 1e-5)
      near(losses(), values, 1e-5)
    end
  end
  T.equal(started()[1].share, {1, 5, 2})
end)

T.test("a loop without lt.run, half precision", function()
  train("", "--own")
  local weights = result()
  train("--ranks 2 --share 3,1", "--own")
  near(result(), weights, 1e-5)
  for _, precision in ipairs{"--amp bf16", "--amp fp16 --wire fp16"} do
    train(precision)
    weights = result()
    train(precision .. " --ranks 2 --share 3,1")
    near(result(), weights, 0.02)
  end
end)

T.test("local batch norm: the running statistics count each image once", function()
  train("--ranks 2", "--norm batch_norm")
  local even = lt.load(folder .. "/w.safetensors")
  train("--ranks 2 --share 5,3", "--norm batch_norm")
  local uneven = lt.load(folder .. "/w.safetensors")
  for _, name in ipairs{"first.mean", "first.var"} do
    T.near(uneven[name]:item(), even[name]:item(), 1e-6)
  end
end)

T.test("a run resumes with other shares, and with another number of ranks", function()
  train ""
  local weights = result()
  forget()
  continue("--ranks 2 --share 3,1 --max-steps 3")
  continue("--ranks 3 --share 1,1,4 --max-steps 7")
  continue("--ranks 2 --max-steps 8")
  continue("--ranks 2 --share 1,4")
  near(result(), weights, 1e-5)
end)

-- ==== --share auto ===============================================================================

local SLOW = "LUATRAIN_FAULT=delay:rank=1:ms=100"

T.test("auto: a slow rank gets fewer images, after step 11", function()
  for _, flags in ipairs{"", "--loop", "--norm sync_batch_norm", "--mixup 0.3"} do
    train("", flags .. " --epochs 3")
    local weights = result()
    local text = train("--ranks 2 --share auto", flags .. " --epochs 3", SLOW)
    near(result(), weights, 1e-5)
    local events = share_events()
    T.equal({#events, events[1].step}, {1, 11})
    local parts = events[1].share
    T.equal(parts[1] + parts[2], flags:find "mixup" and 8 or 16)
    assert(parts[1] > parts[2] and parts[2] >= 1, table.concat(parts, ","))
    assert(text:find(("share auto: the ranks get %d,%d parts of each batch, because they compute ")
                     :format(parts[1], parts[2]), 1, true), text)
    T.equal(#T.events(folder .. "/out", "step"), 15)
  end
end)

T.test("auto: a resumed run on as many ranks keeps the shares", function()
  train("", "--epochs 6")
  local weights = result()
  forget()
  continue("--ranks 2 --share auto --max-steps 12", "--epochs 6", SLOW)
  local parts = share_events()[1].share
  continue("--ranks 2 --share auto --max-steps 14", "--epochs 6")
  T.equal({#share_events(), started()[2].share}, {1, parts})
  continue("--ranks 3 --share auto --max-steps 28", "--epochs 6", SLOW)
  T.equal({#share_events(), #share_events()[2].share, share_events()[2].step}, {2, 3, 25})
  continue("--ranks 3", "--epochs 6")
  near(result(), weights, 1e-5)
end)

T.test("auto: many ranks with large shares", function()
  train("--ranks 8 --share auto --max-steps 12", "--epochs 14 --batch 75", SLOW)
  local parts = share_events()[1].share
  assert(math.max(table.unpack(parts)) > 8 and math.min(table.unpack(parts)) >= 1)
  continue("--ranks 8 --share auto", "--epochs 14 --batch 75")
  T.equal({#share_events(), started()[2].share}, {1, parts})
end)

T.test("auto: a step with two optimizers, of which the first one waits", function()
  train("--ranks 2 --share auto", "--epochs 3 --two", SLOW)
  local parts = share_events()[1].share
  assert(parts[1] > parts[2], table.concat(parts, ","))
end)

-- ==== Errors =====================================================================================

local function ends(options, code, message, flags)
  forget()
  T.ends(folder, ("--quiet --threads 1 --timeout 20 --out out %s t.lua %s")
                 :format(options, flags or ""), code, message)
end

T.test("wrong shares", function()
  local form = "--share must be auto or a list of integers from 1 to 1000000, one for each rank, "
               .. "but is '%s'"
  for _, text in ipairs{"3,0", "3,", ",3", "3,,1", "1.5,2", "-1,2", "even", "3;1", "1,1000001",
                        "1,99999999999999999999"} do
    ends("--ranks 2 --share " .. "'" .. text .. "'", 2, form:format(text))
  end
  ends("--ranks 2 --share", 2, "--share must be auto or a list")
  ends("--ranks 2 --share 3,1,1", 2,
       "--share requires one number for each of the 2 ranks, but '3,1,1' has 3")
  ends("--ranks 3 --share 3,1", 2,
       "--share requires one number for each of the 3 ranks, but '3,1' has 2")
  ends("--share 3", 2, "--share divides each batch among several ranks, but there is 1; start them "
                       .. "with --ranks or mpirun")
  for _, mode in ipairs{"pipe=2,cut=body.fc", "async=asgd"} do
    ends("--ranks 2 --share 3,1 --parallel " .. mode, 2,
         "--share cannot be combined with --parallel")
  end
  for _, text in ipairs{"auto", "3,1"} do
    ends("--ranks 2 --deterministic --share " .. text, 2, "--share cannot be combined with "
         .. "--deterministic, which divides batches in the same way for any number of ranks")
  end
  ends("--ranks 3 --share auto", 2, "lt.run: --share auto requires batches of at least 3 "
       .. "images on 3 ranks, but batch is 2", "--batch 2")
  for _, text in ipairs{"auto", "1,3"} do
    T.ends(folder, ("--threads 1 --ranks 2 --share %s bench dist t.lua"):format(text), 2,
           "bench: dist requires equal shards; omit --share")
  end
  ends("--ranks 2 --share auto", 0, "luatrain: warning: --share auto applies only to lt.run and "
       .. "lt.fit; the script called neither, so the ranks had equal shares", "--own")
end)

T.finish()
