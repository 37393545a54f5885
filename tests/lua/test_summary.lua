-- test_summary.lua - lt.summary: the counts of small nets, checked by hand, and of well-known nets.
local lt = require "luatrain"
local T = require "lt_test"
local nn = lt.nn

-- Returns the words after the name in a row of the table. The name may contain spaces.
local function row(text, name)
  for line in text:gmatch "[^\n]+" do
    local at = line:gsub("^ +", "")
    if at:sub(1, #name) == name then
      local list = {}
      for word in at:sub(#name + 1):gmatch "%S+" do list[#list + 1] = word end
      return list
    end
  end
  error(("no row %s in\n%s"):format(name, text), 2)
end

-- Runs a script in a new folder. Returns its output, its exit code, and whether it left no files.
local function run_script(text)
  local folder = T.folder()
  T.write(folder .. "/script.lua", text)
  local out, code = T.run(folder, "script.lua")
  os.remove(folder .. "/script.lua")
  local is_clean = os.remove(folder) ~= nil
  return out, code, is_clean
end

local function block(c)
  return nn.module({conv = nn.conv2d{c, c, 3, pad = 1, bias = false}, bn = nn.batch_norm{c}},
                   function(self, x) return lt.relu(self.bn(self.conv(x)) + x) end, "block")
end

T.test("a table, counted by hand", function()
  -- For 4 images of 8 x 8 x 2.
  -- conv2d: 4*8*8*3 outputs of 3*3*2 multiply-adds: 4*8*8*3*18*2 = 27,648 FLOP. It keeps the batch,
  --   2048 bytes. relu runs after max_pool2d, which keeps a 1-byte index for each output, 4*4*4*3 =
  --   192. relu keeps its output, 768 bytes, which is also the input of linear. linear: 4*5 outputs
  --   of 48 multiply-adds: 1,920 FLOP.
  local net = nn.sequential{nn.conv2d{2, 3, 3, pad = 1}, lt.relu, nn.max_pool2d{2}, nn.flatten(),
                            nn.linear{48, 5}}
  T.equal(lt.summary(net, {4, 8, 8, 2}), [[
layer                           output  parameters  KFLOP   KB
net: sequential                    4x5         302   29.6  3.0
  1: conv2d{2, 3, 3, pad = 1}  4x8x8x3          57   27.6  2.0
  3: max_pool2d{2}             4x4x4x3                     0.2
  relu                         4x4x4x3                     0.8
  4: flatten                      4x48
  5: linear{48, 5}                 4x5         245    1.9

302 parameters; a batch of 4: 29.57 KFLOP forward, 3.01 KB kept for backward, incl. the batch
FLOP: 2 per multiply-add; counts only convolutions, linear layers and matmuls]])
end)

T.test("counts grow with the batch, small or large", function()
  local net = nn.sequential{nn.linear{50, 100, bias = false}, lt.relu, nn.linear{100, 10}}
  for _, n in ipairs{1, 2, 3, 7, 1000, 1000000} do
    local words = row(lt.summary(net, {n, 50}), "net: sequential")
    local flops, bytes = 2 * n * (50 * 100 + 100 * 10), 4 * n * (50 + 100)
    local function unit(v) return v >= 1e11 and 1e9 or v >= 1e8 and 1e6 or 1e3 end
    T.equal(words, {n .. "x10", "6,010", ("%.1f"):format(flops / unit(flops)),
                    ("%.1f"):format(bytes / unit(bytes))})
  end
end)

T.test("ops that a module calls have rows in it", function()
  local net = nn.module({w = nn.parameter({6, 7}, {value = 1}), fc = nn.linear{7, 8, bias = false}},
                        function(self, x) return self.fc(lt.tanh(x:matmul(self.w)) * 2) end)
  local text = lt.summary(net, {500, 6})
  T.equal(row(text, "matmul"), {"500x7", "42.0", "12.0"})      -- 2*500*7*6; keeps x
  T.equal(row(text, "tanh"), {"500x7", "14.0"})                -- keeps its output
  T.equal(row(text, "fc: linear{7, 8, bias = false}"), {"500x8", "56", "56.0", "14.0"})
  T.equal(row(text, "net: module"), {"500x8", "98", "98.0", "40.0"})
end)

T.test("groups, strides and dilation", function()
  local function flops(options)
    local text = lt.summary(nn.sequential{nn.conv2d(options)}, {10, 9, 9, 4})
    return row(text, "net: sequential")[3]
  end
  T.equal(flops{4, 8, 3}, ("%.1f"):format(2 * 10 * 7 * 7 * 8 * 9 * 4 / 1e3))
  T.equal(flops{4, 8, 3, groups = 4}, ("%.1f"):format(2 * 10 * 7 * 7 * 8 * 9 / 1e3))
  T.equal(flops{4, 8, 3, stride = 2}, ("%.1f"):format(2 * 10 * 4 * 4 * 8 * 9 * 4 / 1e3))
  T.equal(flops{4, 8, {1, 3}, dilation = 2}, ("%.1f"):format(2 * 10 * 9 * 5 * 8 * 3 * 4 / 1e3))
end)

T.test("consecutive equal blocks share a row", function()
  local net = nn.sequential{nn.conv2d{4, 4, 1}, lt.relu, block(4), block(4), block(4),
                            nn.conv2d{4, 8, 1}, block(8)}
  local text = lt.summary(net, {2, 8, 8, 4})
  T.equal(#row(text, "3-5: block, each of 3"), 4)
  T.equal(#row(text, "7: block"), 4)
  T.equal(select(2, text:gsub("conv: ", "")), 2)
  T.equal(row(text, "net: sequential")[2], "1,108")            -- 20 + 3*152 + 40 + 592
end)

T.test("a module that is called again is counted once", function()
  local fc = nn.linear{5, 5}
  local text = lt.summary(nn.sequential{fc, lt.relu, fc}, {3, 5})
  T.equal(row(text, "net: sequential")[2], "30")
  local _, count = text:gsub("shared", "")
  T.equal(count, 1)
end)

T.test("the kept bytes agree with lt.memory", function()
  local net = nn.sequential{nn.conv2d{3, 16, 3, pad = 1}, block(16), nn.max_pool2d{2}, block(16),
                            lt.global_avg_pool2d, nn.linear{16, 10}}
  local x = lt.zeros({32, 16, 16, 3})
  net(lt.zeros({1, 16, 16, 3}))                               -- allocates the parameters
  collectgarbage()
  lt.step(function()
    local before = lt.memory().live
    local y = net(x)
    collectgarbage()
    local kept = lt.memory().live - before + 4 * x:count() - 4 * y:count()
    local said = tonumber(row(lt.summary(net, {32, 16, 16, 3}), "net: sequential")[4]) * 1e3
    assert(said <= kept and said > 0.8 * kept, said .. " " .. kept)   -- the pool rounds up
  end)
end)

T.test("a summary does not change the training", function()
  local function train(summarize)
    return (run_script(([[
      local lt = require "luatrain"
      local nn = lt.nn
      local net = nn.sequential{nn.conv2d{2, 4, 3}, nn.batch_norm{4}, nn.dropout{p = 0.5},
                                nn.flatten(), nn.linear{16, 3}}
      local sgd = lt.optim.sgd(net, {lr = 0.1})
      local y = lt.tensor({0, 1, 2}, {dtype = "i64"})
      for _ = 1, 3 do
        if %s then lt.summary(net, {64, 4, 4, 2}) end
        lt.step(function()
          lt.cross_entropy(net(lt.randn({3, 4, 4, 2})), y):backward()
          sgd:step()
        end)
      end
      print(net:sha256())]]):format(summarize)))
  end
  local hex = train(false)
  T.equal(#hex, 65)
  T.equal(train(true), hex)
end)

T.test("well-known nets", function()
  local function check(name, parameters, multiply_adds)
    local text = lt.summary(lt.models[name]{}, {1, 224, 224, 3})
    T.equal(text:match "\n\n([%d,]+) parameters", parameters)
    T.near(tonumber(text:match "([%d.]+) GFLOP") / 2, multiply_adds, 0.006)
    for line in text:gmatch "[^\n]+" do assert(#line <= 100, line) end
  end
  check("resnet50", "25,557,032", 4.09)
  check("mobilenet_v1", "4,231,976", 0.569)
end)

T.test("invalid nets and shapes", function()
  local usage = "lt.summary requires a net and the shape of its input: "
                .. "lt.summary(net, {n, h, w, c})"
  local net = nn.sequential{nn.linear{5, 5}}
  local call = getmetatable(net).__call
  T.fails(function() lt.summary(lt.relu, {1, 5}) end, usage)
  T.fails(function() lt.summary(net) end, usage)
  T.fails(function() lt.summary(net, {0, 5}) end, usage)
  T.fails(function() lt.summary(net, {2.5, 5}) end, usage)
  T.fails(function() lt.summary(net, {"2", 5}) end, usage)
  T.fails(function() lt.summary(net, {2, 6}) end,
          "net.1 linear: w has 5 input features, but x has 6 (x 2x6 f32, w 5x5 f32)")
  T.equal(getmetatable(net).__call == call, true)             -- restored after the error
  local odd = nn.module({fc = nn.linear{5, 5}}, function(self, x)
    return x:dim(1) == 2 and self.fc(x) or self.fc(x):relu()
  end)
  T.fails(function() lt.summary(odd, {2, 5}) end,
          "lt.summary: the net does not run the same ops for 2 images and for 3")
end)

T.test("lt.summary within a loop over lt.micro_batches", function()
  local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{16, 3}}
  local sgd = lt.optim.sgd(net, {lr = 0.1})
  for x, y, share in lt.micro_batches(3, lt.zeros{6, 4, 4, 1}, lt.zeros({6}, {dtype = "i64"})) do
    (lt.cross_entropy(net(x), y) * share):backward()
    lt.summary(net, {1, 4, 4, 1})
  end
  sgd:step()
end)

T.test("after attach(), a run shows its net, makes no folder and ends", function()
  local out, code, is_clean = run_script [[
    require "luatrain.commands.summary".attach "script.lua"
    local lt = require "luatrain"
    local train = lt.data.open "synthetic:4x4x3/5/100"
    local net = lt.nn.sequential{lt.nn.flatten(), lt.nn.linear{48, 5}}
    lt.run{net = net, optim = lt.optim.sgd(net, {lr = 0.1}), train = train, epochs = 1, batch = 20}
    print "not reached"]]
  T.equal(row(out, "net: sequential")[1], "20x5")
  T.equal(out:match "matmuls\n(.*)$", "")
  T.equal(code, 0)
  assert(is_clean)
end)

T.finish()
