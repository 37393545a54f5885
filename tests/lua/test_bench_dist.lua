-- test_bench_dist.lua - the cost of data parallelism: the prediction, checked by hand, and
-- `luatrain bench dist`.
local T = require "lt_test"
local dist = require "luatrain.commands.bench_dist"
local json = require "luatrain.json"

local function near(a, b) return math.abs(a - b) <= 1e-9 * math.abs(b) end

-- ==== The model ==================================================================================

T.test("alpha and beta are recovered", function()
  for _, n in ipairs{2, 4} do
    local sums = {{bytes = 1 << 10, seconds = 1.0}}            -- too small to count
    for i = 16, 24, 2 do
      local bytes = 1 << i
      sums[#sums + 1] = {bytes = bytes,
                         seconds = 2 * (n - 1) * 3e-6 + 2 * (n - 1) / n * bytes * 5e-10}
    end
    local link = dist.fit(sums, n)
    assert(near(link.alpha, 3e-6) and near(link.beta, 5e-10))
  end
end)

T.test("a bucket is sent when it is ready and the previous one is done", function()
  local apart = {total = 1.0, backward = 0.6}
  local buckets = {{bytes = 1e6, ready = 0.1}, {bytes = 2e6, ready = 0.2},
                   {bytes = 1e6, ready = 0.6}}
  local function at(n, alpha, beta)
    return dist.predict(n, {alpha = alpha, beta = beta}, apart, buckets)
  end
  T.equal(at(2, 0, 0), 1.0)
  assert(near(at(2, 0, 1e-7), 1.1))           -- only the last is exposed
  assert(near(at(2, 0, 2.5e-7), 1.5))         -- 0.1 + 0.25 + 0.5 + 0.25, in sequence
  assert(near(at(2, 0.01, 1e-7), 1.12))       -- plus twice the latency
  assert(near(at(4, 0, 1e-7), 1.15))          -- 2 (n - 1) / n is 1.5
  assert(at(24, 1e-5, 1e-7) < at(32, 1e-5, 1e-7))
end)

-- ==== luatrain bench dist ========================================================================

local folder = T.folder()

local function ends(...) return T.ends(folder, ...) end

local function write(name, text) T.write(folder .. "/" .. name, text) end

local function read(name) return json.read(T.read(folder .. "/" .. name)) end

write("train.lua", [[
  local lt = require "luatrain"
  local train, test = lt.data.open "synthetic:8x8x2/5/12"
  local net = lt.nn.sequential{lt.nn.conv2d{2, 3, 3}, lt.nn.flatten(), lt.nn.linear{108, 5}}
  local sgd = lt.optim.sgd(net, {lr = 0.01})
  lt.fit{net = net, optim = sgd, train = train, test = test, epochs = 1, batch = 4,
         max_steps = 2}
]])
write("nothing.lua", "local lt = require 'luatrain'")

T.test("allreduces by size", function()
  local out = ends("--ranks 3 bench dist --most 1 --json sums.json", 0, "")
  assert(out:find "allreduce +us +GB/s +of copy")
  assert(out:find "\n256 KiB +[%d.]+ +[%d.]+ +%d+ %%\n1 MiB +[%d.]+")
  local r = read "sums.json"
  T.equal(r.ranks, 3)
  T.equal(#r.sums, 6)
  T.equal(r.sums[6].bytes, 1 << 20)
  assert(r.sums[6].seconds > 0 and not r.sums[6].mpi_seconds)
end)

T.test("all ways of exchanging gradients", function()
  local out = ends("--ranks 2 --wire fp16 bench dist --most 1 --steps 6 --ablation --link 10 "
                   .. "--latency 5 --json all.json train.lua", 0,
                   "6 steps of 4 images in each mode, f16 wire")
  assert(out:find "\n2 ranks +[%d.]+ +[%d.]+ %% +[%d.]+ +[%d.]+ +measured [%d.]+ ms")
  assert(out:find "At 10 Gbit/s, 2 ranks need [%d.]+ ms")
  local r = read "all.json"
  local collectives = {}
  for i, way in ipairs(r.ways) do
    collectives[i] = way.collectives
    assert(way.total > way.backward and way.backward > 0 and way.ratio > 0)
  end
  T.equal(collectives, {0, 1, 0, 1, 4, 4})
  assert(r.ways[1].waited == 0 and r.ways[3].waited > 0 and r.ways[3].sent == 0)
  local own, sent = 2 * (64 + 16 + 544 + 5), r.ways[2].sent - r.ways[1].sent
  assert(sent > own and sent < own + 600, sent)            -- plus the step record and the
                                                           -- tail of the bucket
  T.equal(#r.buckets, 1)
  T.equal(r.buckets[1].bytes, 4 * (64 + 16 + 544 + 5))     -- aligned to 64 bytes
  T.equal(r.predictions[3].ranks, 32)
  assert(near(r.predictions[3].alpha, 5e-6) and near(r.predictions[3].beta, 4e-10))
end)

T.test("a loss scale adds no collective", function()
  ends("--ranks 2 bench dist --amp fp16 --most 1 --steps 3 --json half.json train.lua", 0, "")
  local collectives = {}
  for i, way in ipairs(read "half.json".ways) do collectives[i] = way.collectives end
  T.equal(collectives, {0, 1, 0})
end)

-- Stage 0 has the two parameters of the convolution, stage 1 those of the linear layer.
T.test("all ways of summing over the replicas of a pipeline", function()
  local command = "--threads 1 --ranks 4 --parallel pipe=2,data=2,micro=2,cut=3 bench dist "
                  .. "--steps 3 %s train.lua"
  local out = ends(command:format "--ablation --json pipe.json", 0,
                   "3 steps of 4 images in each way, f32 wire")
  assert(out:find "1 thread per rank, 2 stages of 2 replicas\n")
  assert(out:find "steps +ms +no sums / it +img/s +forward +backward +weights +messages +optimizer "
         .. "+waits +collectives +MB sent\n")
  assert(not out:find "allreduce" and not out:find "simulated")
  local r, collectives = read "pipe.json", {}
  T.equal({r.ranks, r.stages, r.replicas}, {4, 2, 2})
  for i, way in ipairs(r.ways) do
    collectives[i] = way.collectives
    assert(way.total > 0 and way.ratio > 0 and way.forward > 0 and way.waiting >= 0)
    assert((way.waited > 0) == (i > 1))
  end
  T.equal(collectives, {0, 1, 1, 1, 2, 2, 1})
  local extra = r.ways[2].sent - r.ways[1].sent          -- of rank 0: the first stage
  assert(extra >= 4 * (64 + 3), extra)
  out = ends(command:format "", 0, "sums within the last pass")
  assert(not out:find "one per stage")
end)

T.test("a benchmark leaves only its JSON files", function()
  T.equal(T.names(folder), "all.json half.json nothing.lua pipe.json sums.json train.lua")
end)

T.test("invalid arguments", function()
  for arguments, text in pairs{
    ["bench dist"] = "bench: dist requires several ranks: mpirun -np 2 luatrain, or --ranks 2",
    ["--ranks 2 bench dist --step 3"] = "bench: unknown option '--step' (did you mean '--steps'?)",
    ["--ranks 2 bench dist --most x"] = "bench: --most must be a positive integer, but is 'x'",
    ["--ranks 2 bench dist --ablation=1"] = "bench: --ablation takes no value",
    ["--ranks 2 --out x bench dist"] = "bench: --out has no effect here",
    ["--ranks 2 bench dist --link 0"] = "bench: --link must be above 0 Gbit/s",
    ["--ranks 2 --deterministic --vranks 4 bench dist"] =
      "bench: dist requires one shard per rank; omit --vranks",
    ["--ranks 2 --parallel pipe=2,cut=3 bench dist train.lua"] =
      "bench: dist compares sums over replicas, but each stage has only one; use data=G",
    ["--ranks 4 --parallel pipe=2,data=2,cut=3 bench dist --link 3 train.lua"] =
      "bench: --link has no effect with a pipeline; see luatrain plan --link",
    ["--ranks 4 --parallel pipe=2,data=2,cut=3 bench dist --steps 2"] =
      "bench: dist with --parallel pipe=P requires a script: luatrain bench dist train.lua",
  } do ends(arguments, 2, text) end
  ends("--ranks 2 bench dist --most 1 nothing.lua", 1,
       "bench: nothing.lua ended before all steps were measured")
end)

T.finish()
