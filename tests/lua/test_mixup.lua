-- test_mixup.lua - mixup: pairs and shares, in lt.fit, in other loops and on several ranks.
local lt = require "luatrain"
local nn = lt.nn
local T = require "lt_test"

T.test("neighbours are mixed with each other", function()
  lt.seed(3)
  local x = lt.arange(5 * 2 * 3):reshape({5, 2, 3}):cast "f32"
  local y = lt.tensor({4, 3, 2, 1, 0}, {dtype = "i64"})
  local mixed, other, share = lt.mixup(x, y, 0.4)
  T.equal(other:totable(), {3, 4, 1, 2, 0})
  assert(share > 0 and share < 1 and math.type(share) == "float")
  T.equal(mixed.shape, {5, 2, 3})
  local got, from = mixed:totable(), x:totable()
  for row, partner in ipairs{2, 1, 4, 3, 5} do
    for i = 1, 2 do
      for k = 1, 3 do
        T.near(got[row][i][k], share * from[row][i][k] + (1 - share) * from[partner][i][k], 1e-5)
      end
    end
  end
  local one, label = lt.mixup(lt.ones{1, 2}, lt.tensor({7}, {dtype = "i64"}), 1)
  T.near(one:totable()[1][2], 1)
  T.equal(label:totable(), {7})
end)

T.test("the share is a function of seed and step", function()
  local function share(seed)
    if seed then lt.seed(seed) end
    return (select(3, lt.mixup(lt.ones{2}, lt.ones{2}, 0.3)))
  end
  local first = share(1)
  lt.randn{5}
  T.equal(share(1), first)
  assert(share(2) ~= first)
  local net = nn.linear{1, 1}
  net(lt.ones{1, 1}):sum():backward()
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  sgd:step()
  T.equal(share(1), first)
  net(lt.ones{1, 1}):sum():backward()
  sgd:step()
  assert(share() ~= first, "each step has its own share")
end)

T.test("shares have a beta distribution", function()
  local x, n = lt.ones{1}, 4000
  for _, alpha in ipairs{0.1, 0.4, 1.0, 5.0} do
    local sum, squares, fourths = 0, 0, 0
    for seed = 1, n do
      lt.seed(seed)
      local _, _, share = lt.mixup(x, x, alpha)
      local d = share - 0.5
      sum, squares, fourths = sum + d, squares + d ^ 2, fourths + d ^ 4
    end
    local variance = 1 / (4 * (2 * alpha + 1))
    T.near(sum / n, 0, 4 * math.sqrt(variance / n))
    T.near(squares / n, variance, 0.06 * variance)
    local fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    T.near(fourths / n, fourth, 0.12 * fourth)
  end
  lt.seed(1)
  local _, _, share = lt.mixup(x, x, 1e-9)            -- only one of the two images
  assert(share == 0 or share == 1)
  T.near((select(3, lt.mixup(x, x, 1e9))), 0.5, 1e-3)
end)

T.test("invalid arguments", function()
  local x, y = lt.ones{2}, lt.ones{3}
  T.fails(function() lt.mixup(x, y, 0.2) end, "lt.mixup: x has 2 samples, but y has 3")
  T.fails(function() lt.mixup(x, x, -1) end,
          "lt.mixup: 'alpha' must be a non-negative number, but is -1")
  T.fails(function() lt.mixup(x, 5, 1) end, "lt.mixup: 'y' must be a tensor, but is 5")
end)

-- ==== Training ===================================================================================

-- Prepares training on 23 images, by default in batches of 10, 10 and 3. One of `loops` follows,
-- with BATCH, MIXUP and MICRO_BATCHES replaced by numbers.
local script = [[
  local lt = require "luatrain"
  local nn = lt.nn
  lt.seed(5)
  local train = lt.data.set{images = lt.randn{23, 4, 4, 1}, classes = 23,
                            labels = lt.arange(23):cast "i64"}
  local net = nn.sequential{nn.flatten(), nn.linear{16, 23}}
  local sgd = lt.optim.sgd(net, {lr = 0.3, momentum = 0.9})
]]
local loops = {
  fit = [[
    lt.fit{net = net, optim = sgd, train = train, test = train, epochs = 2, batch = BATCH,
           label_smoothing = 0.1, mixup = MIXUP, accumulate = MICRO_BATCHES}
  ]],
  run = [[
    local run <close> = lt.run{net = net, optim = sgd, train = train, epochs = 2, batch = BATCH,
                               mixup = MIXUP}
    for _ in run:epochs() do
      for x, y in run:batches() do
        run:step(function()
          local mixed, other, share = run:mixup(x, y)
          local z = net(mixed)
          local loss = lt.cross_entropy(z, y, 0.1) * share
                       + lt.cross_entropy(z, other, 0.1) * (1 - share)
          loss:backward()
          sgd:step()
          return loss
        end)
      end
    end
  ]],
  plain = [[
    for epoch = 1, 2 do
      for x, y in train:batches{batch = BATCH, shuffle = true, epoch = epoch, grain = 2} do
        local mixed, other, share = lt.mixup(x, y, MIXUP)
        local z = net(mixed)
        local loss = lt.cross_entropy(z, y, 0.1) * share
                     + lt.cross_entropy(z, other, 0.1) * (1 - share)
        loss:backward()
        sgd:step()
      end
    end
  ]],
}

-- Runs the script with one of the loops. Returns the weights as one list.
local function trained(options, loop, mixup, micro_batches, batch)
  local folder = T.folder(script .. loops[loop]:gsub("MIXUP", mixup or 0.4)
                                               :gsub("MICRO_BATCHES", micro_batches or 1)
                                               :gsub("BATCH", batch or 10)
                          .. [[ if lt.rank() == 0 then lt.save("w.safetensors", net) end ]])
  T.ends(folder, "--quiet --out out " .. options .. " t.lua", 0, "")
  local tensors, list = lt.load(folder .. "/w.safetensors"), {}
  for _, name in ipairs{"2.w", "2.b"} do
    local values = tensors[name]:reshape({-1}):totable()
    table.move(values, 1, #values, #list + 1, list)
  end
  return list
end

local function near(a, b, tolerance)
  T.equal(#a, #b)
  for i, value in ipairs(a) do T.near(value, b[i], tolerance) end
end

local whole = trained("", "fit")

T.test("lt.fit, lt.run and a plain loop give the same weights", function()
  T.equal(trained("", "run"), whole)
  T.equal(trained("", "plain"), whole)
end)

T.test("micro-batches", function() near(trained("", "fit", 0.4, 3), whole, 1e-5) end)

-- The last batch has 5 rows.
T.test("more micro-batches than the last rank has rows in the last batch", function()
  local one = trained("", "fit", 0.4, 1, 18)
  near(trained("--ranks 2", "fit", 0.4, 2, 18), one, 1e-5)
  near(trained("--deterministic --vranks 2", "fit", 0.4, 4, 18), one, 1e-5)
end)

T.test("mixup changes the weights", function()
  local none = trained("", "fit", 0)
  T.equal(trained("", "run", 0), none)
  local far = 0
  for i, value in ipairs(none) do far = math.max(far, math.abs(value - whole[i])) end
  assert(far > 0.01)
end)

T.test("any number of ranks gives the same weights", function()
  for _, ranks in ipairs{2, 3, 4} do
    for loop in pairs(loops) do near(trained("--ranks " .. ranks, loop), whole, 1e-5) end
  end
  near(trained("--ranks 3", "fit", 0.4, 3), whole, 1e-5)
  local four = trained("--deterministic --vranks 4", "fit")
  near(four, whole, 1e-5)
  T.equal(trained("--ranks 2 --deterministic --vranks 4", "fit"), four)
  T.equal(trained("--ranks 4 --deterministic --vranks 4", "fit"), four)
end)

T.finish()
