-- train_lenet.lua - trains LeNet on Fashion-MNIST with an explicit loop.
--
--   luatrain train_lenet.lua
--   luatrain train_lenet.lua --data fashion-mnist:DIR --epochs 5 --save lenet.safetensors
local lt = require "luatrain"

local opt = lt.args{data = "fashion-mnist", epochs = 3, batch = 64, lr = 0.05, save = ""}
local train, test = lt.data.open(opt.data)
local net = require "lenet"{classes = train.classes}
local sgd = lt.optim.sgd(net, {lr = opt.lr, momentum = 0.9, decay = 1e-4})
print(net)

local steps = opt.epochs * math.ceil(#train / opt.batch)

local function learn(x, y)
  sgd.lr = opt.lr * (1 - lt.steps() / steps)       -- down to 0, linearly
  local loss = lt.cross_entropy(net(x), y)
  loss:backward()
  sgd:step()
  return loss
end

local function hits(x, y) return net(x):argmax(2):eq(y):sum():item() end

local function top1()
  local right = 0
  net:eval()
  for x, y in test:batches{batch = 500} do
    right = right + lt.step(lt.no_grad, hits, x, y)
  end
  net:train()
  return right / #test
end

for epoch = 1, opt.epochs do
  for x, y in train:batches{batch = opt.batch, shuffle = true, epoch = epoch} do
    local loss = lt.step(learn, x, y)              -- temporaries die with each step
    if lt.steps() % 200 == 0 then print(("step %d  loss %.3f"):format(lt.steps(), loss:item())) end
  end
  print(("epoch %d  top1 %.2f %%"):format(epoch, 100 * top1()))
end
if opt.save ~= "" then lt.save(opt.save, net) end
print("weights_sha256 " .. net:sha256())
