-- test_data.lua - the sources of images, on a small copy of Fashion-MNIST that is written here.
local lt = require "luatrain"
local T = require "lt_test"

local folder = os.tmpname()
os.remove(folder)
assert(os.execute("mkdir " .. folder))

local function write(name, ...)
  local file = assert(io.open(folder .. "/" .. name, "wb"))
  file:write(...)
  file:close()
end

-- n images of 2 x 2; all bytes of image i are i.
local function write_images(name, n)
  local bytes = {}
  for i = 1, n do bytes[i] = string.char(i):rep(4) end
  write(name, "\0\0\8\3", (">I4I4I4"):pack(n, 2, 2), table.concat(bytes))
end

local function write_labels(name, n)
  local bytes = {}
  for i = 1, n do bytes[i] = string.char(i % 10) end
  write(name, "\0\0\8\1", (">I4"):pack(n), table.concat(bytes))
end

local name = "fashion-mnist:" .. folder

T.test("missing files name the package and the flag", function()
  T.fails(function() lt.data.open(name) end,
          ("fashion-mnist: there is no %s/train-images-idx3-ubyte.gz; "
          .. "'apt-get install dataset-fashion-mnist' brings it, or name a folder that has it: "
          .. "--data fashion-mnist:DIR")
          :format(folder))
  T.fails(function() lt.data.open("fashion-mnits") end,
          "unknown data 'fashion-mnits' (did you mean 'fashion-mnist'?)")
  T.fails(function() lt.data.open("x") end, "unknown data 'x' (there is fashion-mnist)")
end)

write_images("train-images-idx3-ubyte", 25)
write_labels("train-labels-idx1-ubyte", 25)
write_images("t10k-images-idx3-ubyte", 7)
write_labels("t10k-labels-idx1-ubyte", 7)

T.test("sets and batches", function()
  local train, test = lt.data.open(name)
  T.equal(#train, 25)
  T.equal(#test, 7)
  T.equal(train.classes, 10)
  T.equal(#train.names, 10)
  T.equal(train.images.shape, {25, 2, 2})
  local sizes, first = {}, {}
  for x, y in train:batches{batch = 10} do
    sizes[#sizes + 1] = x:dim(1)
    first[#first + 1] = y:get(1)
    T.equal(x.shape, {#y, 2, 2, 1})
    T.equal(y.dtype, "i64")
    T.near(x:get(1, 1, 1, 1), ((#sizes - 1) * 10 + 1) / 255 / 0.3530 - 0.2860 / 0.3530, 1e-5)
  end
  T.equal(sizes, {10, 10, 5})
  T.equal(first, {1, 1, 1})
  for x in test:batches{7, dtype = "f64"} do T.equal(x.dtype, "f64") end
end)

T.test("an epoch has an order of its own, and each image once", function()
  local train = lt.data.open(name)
  local function order(epoch)
    local list = {}
    for x in train:batches{batch = 4, shuffle = true, epoch = epoch} do
      for i = 1, #x do
        list[#list + 1] = math.floor((x:get(i, 1, 1, 1) * 0.3530 + 0.2860) * 255 + 0.5)
      end
    end
    return list
  end
  local one, two = order(1), order(2)
  T.equal(order(1), one)
  assert(table.concat(one, " ") ~= table.concat(two, " "))
  table.sort(one)
  for i = 1, 25 do T.equal(one[i], i) end
end)

T.test("refused", function()
  local train = lt.data.open(name)
  T.fails(function() train:batches{} end,
          "batches: 'batch' must be given: batches{batch; shuffle=false, epoch=1, dtype=f32}")
  T.fails(function() train:batches{batch = 4, shufle = true} end,
          "batches: unknown key 'shufle' (did you mean 'shuffle'?)")
  T.fails(function() train:batches{batch = 0} end,
          "batches: 'batch' wants a whole number from 1 up, it is 0")
  write_labels("t10k-labels-idx1-ubyte", 6)
  T.fails(function() lt.data.open(name) end,
          ("fashion-mnist: %s/t10k-*: there are images 7x2x2 u8 and labels 6 u8, "
          .. "which do not belong together"):format(folder))
end)

os.execute("rm -r " .. folder)
T.finish()
