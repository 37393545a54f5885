-- test_data.lua - data sets, read from small files in the formats of the real ones.
local lt = require "luatrain"
local T = require "lt_test"

local folder = T.folder()

local function write(name, ...)
  local file = assert(io.open(folder .. "/" .. name, "wb"))
  file:write(...)
  file:close()
end

-- Writes n images of 2 x 2; all bytes of image i are i.
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
          ("fashion-mnist: %s/train-images-idx3-ubyte.gz is missing; "
          .. "run 'apt-get install dataset-fashion-mnist', or name a folder that has it: "
          .. "--data fashion-mnist:DIR")
          :format(folder))
  T.fails(function() lt.data.open("fashion-mnits") end,
          "unknown data 'fashion-mnits' (did you mean 'fashion-mnist'?)")
  T.fails(function() lt.data.open("x") end,
          "unknown data 'x' (known: fashion-mnist[:DIR], cifar10:DIR, images:DIR, "
          .. "synthetic:HxWxC/CLASSES[/COUNT])")
end)

write_images("train-images-idx3-ubyte", 25)
write_labels("train-labels-idx1-ubyte", 25)
write_images("t10k-images-idx3-ubyte", 7)
write_labels("t10k-labels-idx1-ubyte", 7)

T.test("file names in messages are printable", function()
  T.fails(function() lt.data.open "images:x\27[31m\n\xc2\x9by\xc3\xa9" end,
          "images: x?[31m??y\xc3\xa9 must have the folders train, and val or test, each with a "
          .. "folder per class, but has no train")
  local path = ("/0123"):rep(700)
  T.fails(function() lt.data.open("cifar10:" .. path) end,
          ("cifar10: found neither ...%s/data_batch_1.bin nor ...%s/train; the former is in "
          .. "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz")
          :format(path:sub(-200), path:sub(-200)))
  os.execute(("ln -s loop %s/loop"):format(folder))
  T.fails(function() lt.data.open(("cifar10:%s/loop"):format(folder)) end,
          ("cannot check whether %s/loop/data_batch_1.bin exists: Too many levels of symbolic "
           .. "links")
          :format(folder))
end)

-- Nothing writes to the FIFO; the time limit kills a process that waits for it.
T.test("a FIFO is not a data file", function()
  write("fifo.lua", ([[
    require "luatrain".data.open("fashion-mnist:%s/fifo")]]):format(folder))
  assert(os.execute(("mkdir %s/fifo && mkfifo %s/fifo/train-images-idx3-ubyte.gz")
                    :format(folder, folder)))
  T.ends(folder, "fifo.lua", 4, "fifo/train-images-idx3-ubyte.gz is not a regular file",
         "timeout 20")
end)

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

T.test("each epoch has its own order and each image once", function()
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

T.test("invalid arguments", function()
  local train = lt.data.open(name)
  T.fails(function() train:batches{} end,
          "batches: 'batch' is missing: batches{batch; shuffle=false, epoch=1, first=0, "
          .. "dtype=f32, crop=0, flip=false, area=1.0, workers?, shard=false, grain=1, "
          .. "on_request=false}")
  T.fails(function() train:batches{batch = 4, shufle = true} end,
          "batches: unknown key 'shufle' (did you mean 'shuffle'?)")
  T.fails(function() train:batches{batch = 0} end,
          "batches: 'batch' must be a positive integer, but is 0")
  T.fails(function() train:batches{batch = 4, area = 0.0} end,
          "batches: 'area' must be a fraction above 0 and up to 1, but is 0")
  T.fails(function() train:batches{batch = 4, crop = 2} end,
          "batches: crop must be 0 to 1 pixels, less than the size of the images (2x2), but is 2")
  T.fails(function() train:batches{batch = 4, workers = -1} end,
          "batches: 'workers' must be a non-negative integer, but is -1")
  T.fails(function() lt.data.open(name, {size = 32}) end,
          ("data.open: size is only for images:DIR; the images of %s have a fixed size")
          :format(name))
  write("t10k-labels-idx1-ubyte", "\0\0\8\1", (">I4"):pack(7), "\0\1\2\10\4\5\6")
  T.fails(function() lt.data.open(name) end,
          ("%s/t10k-labels-idx1-ubyte: label 4 of 7 is 10, but the 10 classes are 0 to 9")
          :format(folder))
  write_images("t10k-images-idx3-ubyte", 0)
  write_labels("t10k-labels-idx1-ubyte", 0)
  T.fails(function() lt.data.open(name) end,
          ("%s/t10k-images-idx3-ubyte is empty: axis 1 has 0 elements"):format(folder))
  write_images("t10k-images-idx3-ubyte", 7)
  write_labels("t10k-labels-idx1-ubyte", 6)
  T.fails(function() lt.data.open(name) end,
          ("fashion-mnist: %s/t10k-*: images 7x2x2 u8 and labels 6 u8 do "
          .. "not match"):format(folder))
end)

-- ==== Passes =====================================================================================

-- The images of a pass, indexed by label.
local function by_label(set, options)
  local images = {}
  for x, y in set:batches(options) do
    local list = x:totable()
    for i, label in ipairs(y:totable()) do images[label + 1] = list[i] end
  end
  return images
end

local function differ(a, b) assert(not pcall(T.equal, a, b)) end

local function numbered(n)
  local labels = lt.arange(n, {dtype = "i64"})
  return lt.data.set{lt.randn({n, 5, 5, 3}), labels}
end

T.test("batch size, order and workers do not change augmentation", function()
  local set = lt.data.open("synthetic:8x8x3/40/40")
  for _, kind in ipairs{{crop = 2, flip = true}, {area = 0.3, flip = true}} do
    local seen
    for k, o in ipairs{{batch = 40}, {batch = 7, shuffle = true}, {batch = 3, workers = 0},
                       {batch = 16, workers = 3}} do
      for key, value in pairs(kind) do o[key] = value end
      local images = by_label(set, o)
      if k > 1 then T.equal(images, seen) end
      seen = images
    end
    kind.batch, kind.epoch = 40, 2
    differ(by_label(set, kind), seen)
    differ(by_label(set, {batch = 40}), seen)
  end
end)

T.test("first skips images that were already seen", function()
  local set = numbered(30)
  local function labels(first)
    local list = {}
    for _, y in set:batches{batch = 4, shuffle = true, first = first, workers = 2} do
      table.move(y:totable(), 1, #y, #list + 1, list)
    end
    return list
  end
  local all = labels(0)
  T.equal(#all, 30)
  T.equal(labels(12), table.move(all, 13, 30, 1, {}))
  T.equal(labels(30), {})
  T.fails(function() set:batches{batch = 4, first = 31} end,
          "batches: first must be 0 to 30, the number of images, but is 31")
end)

T.test("a loop may end early, and a pass has statistics", function()
  local set = numbered(100)
  for x in set:batches{batch = 10, workers = 2} do
    local function captures() return x end       -- here Lua 5.4.4 loses the loop's closing value
    assert(captures() == x)
    break
  end
  for _ in ipairs{1} do end
  local pass <close> = set:open_batches{batch = 10, workers = 2}
  local x, y = pass:next()
  T.equal(x.shape, {10, 5, 5, 3})
  T.equal(y:totable(), {0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
  local stats = pass:stats()
  T.equal(stats.workers, 2)
  assert(stats.images >= 10 and stats.wait_s > 0 and stats.work_s > 0)
  pass:close()
  local closed = "batches: this pass over the data was closed; open another with set:batches"
  T.fails(function() return pass:next() end, closed)
  T.fails(function() return pass:stats() end, closed)
  pass:close()
  for value, text in pairs{[5] = "5", [{}] = "a table", [set.source] = "userdata"} do
    for _, method in ipairs{"next", "request", "stats", "close"} do
      T.fails(function() return pass[method](value) end,
              ("batches: call this as pass:%s(), on the result of set:open_batches, not on %s")
                :format(method, text))
    end
  end
  T.fails(function() return pass.next() end,
          "batches: call this as pass:next(), on the result of set:open_batches, not on nil")
end)

T.test("a pass may return requested batches only", function()
  local set = numbered(30)
  local order = select(2, set:open_batches{batch = 30, shuffle = true, epoch = 3}:next()):totable()
  for _, workers in ipairs{0, 2} do
    local pass <close> = set:open_batches{batch = 8, shuffle = true, epoch = 3, workers = workers,
                                          on_request = true}
    T.equal(pass:next(), nil)
    for _, first in ipairs{16, 3, 24.0, 3} do pass:request(first) end
    for _, first in ipairs{16, 3, 24, 3} do
      local x, y = pass:next()
      T.equal(y:totable(), table.move(order, first + 1, math.min(first + 8, 30), 1, {}))
      T.equal(x.shape, {math.min(8, 30 - first), 5, 5, 3})
    end
    T.equal(pass:next(), nil)
    T.equal(pass:stats().images, 30)

    for value, text in pairs{["3"] = "'3'", [2.5] = "2.5", [{}] = "a table"} do
      T.fails(function() pass:request(value) end,
              "batches: pass:request requires a whole number, a position, but got " .. text)
    end
    T.fails(function() pass:request() end,
            "batches: pass:request requires a whole number, a position, but got nil")
    T.fails(function() pass:request(30) end,
            "batches: position 30 was requested, but the source has 30 images, counted from 0")
    for first = 0, 15 do pass:request(first) end
    T.fails(function() pass:request(0) end,
            "batches: 16 requests are outstanding, the maximum; take a batch before the next "
            .. "request")
  end
  local pass = set:open_batches{batch = 8, on_request = true}
  pass:close()
  T.fails(function() pass:request(0) end,
          "batches: this pass over the data was closed; open another with set:batches")
  T.fails(function() set:open_batches{batch = 8}:request(0) end,
          "batches: only a pass with on_request accepts requests")
  T.fails(function() set:open_batches{batch = 8, on_request = true, first = 8} end,
          "batches: on_request cannot be combined with first")
  T.fails(function() set:open_batches{batch = 8, on_request = true, shard = true} end,
          "batches: on_request cannot be combined with shard")
  T.fails(function() set:batches{batch = 8, on_request = true} end,
          "batches: on_request requires set:open_batches")
end)

-- Returns the error of fn(...). The first garbage collection during the call runs the finalizer.
local function collect_inside(finalizer, fn, ...)
  collectgarbage("incremental", 200, 100, 60)      -- a whole collection in one step
  collectgarbage()
  setmetatable({}, {__gc = finalizer})
  collectgarbage("restart")                        -- the next allocation starts it
  local ok, why = pcall(fn, ...)
  collectgarbage("incremental", 200, 100, 13)
  return not ok and why:gsub("^[^:]*:%d+: ", "")
end

-- Under the sanitizers, a use after free stops the test.
T.test("a finalizer may close a pass that is in use", function()
  local set = lt.data.open "synthetic:2x2x1/2/20"
  local pass = set:open_batches{batch = 1, workers = 0}
  T.equal(collect_inside(function() pass:close() end, pass.next, pass),
          "batches: this pass over the data was closed; open another with set:batches")

  T.equal(collect_inside(function() local _ <close> = set.source end, T.core().new_batches,
                         set.source, {batch = 1, dtype = "f32"}, {}, {}),
          "this luatrain.Source was closed")
end)

-- ==== Tensors of the user ========================================================================

T.test("a set of images in a tensor", function()
  local x, y = lt.zeros({4, 3, 2}, {dtype = "u8"}), lt.tensor({2, 0, 0, 1}, {dtype = "i32"})
  local set = lt.data.set{x, y, mean = 0.5, std = 0.25}
  T.equal({#set, set.count, set.classes, set.height, set.width, set.channels},
          {4, 4, 3, 3, 2, 1})
  T.equal({set.mean, set.std, set.augment}, {{0.5}, {0.25}, {}})
  local bx, by = set:open_batches{batch = 9}:next()
  T.equal(bx.shape, {4, 3, 2, 1})
  T.equal(bx:get(1, 1, 1, 1), -2.0)
  T.equal(by:totable(), {2, 0, 0, 1})

  set = lt.data.set{images = lt.ones({2, 1, 1, 3}), labels = lt.zeros({2}, {dtype = "u8"}),
                    names = {"a", "b"}, mean = {0.5, 0, 1}, std = {1, 2, 4}}
  T.equal({set.classes, set.names}, {2, {"a", "b"}})
  T.equal(set:open_batches{batch = 1}:next():totable(), {{{{0.5, 0.5, 0.0}}}})
  set.mean = 1                                     -- may be set later
  T.equal(set:open_batches{batch = 1}:next():totable(), {{{{0.0, 0.0, 0.0}}}})
  set.mean = {1, 2}
  T.fails(function() set:batches{batch = 1} end,
          "data: mean has 2 numbers, but the images have 3 channels")
  set.mean = {1, "x", 3}
  T.fails(function() set:batches{batch = 1} end,
          "data: mean must be finite, but channel 2 has x")

  local kept = lt.step(function()                  -- a set outlives the step that made it
    return lt.data.set{lt.ones({2, 1, 1}), lt.zeros({2}, {dtype = "u8"})}
  end)
  T.equal(kept.images:sum():item(), 2.0)
  T.equal(kept:open_batches{batch = 2}:next():totable(), {{{{1.0}}}, {{{1.0}}}})
end)

T.test("invalid arguments of data.set", function()
  local x, y = lt.zeros({4, 3, 2, 3}), lt.tensor({2, 0, 0, 1}, {dtype = "i32"})
  local cases = {
    {{x}, "data.set: 'labels' is missing: "
          .. "data.set{images, labels; classes?, names?, mean?, std?}"},
    {{x, 5}, "data.set: 'labels' must be a tensor, but is 5"},
    {{x, y, clases = 3}, "data.set: unknown key 'clases' (did you mean 'classes'?)"},
    {{x, y, classes = 2}, "data.set: label 1 of 4 is 2, but the 2 classes are 0 to 1"},
    {{x, lt.tensor({0, 1, -1, 0}, {dtype = "i64"})},
     "data.set: label 3 of 4 is -1, but classes count from 0"},
    {{x, y, names = {"a", 1}}, "data.set: 'names' must be a list of strings, but item 2 is 1"},
    {{x, y, names = {"a", "b"}, classes = 3}, "data.set: there are 2 names for 3 classes"},
    {{x, y, names = {[0] = "a", "b", "c"}},
     "data.set: 'names' must be a list of strings, but is a table"},
    {{x, y, mean = {[0] = 1, 1, 1, 1}},
     "data.set: 'mean' must be a number or a list of numbers, but is a table"},
    {{x, y, mean = {1, 2}}, "data: mean has 2 numbers, but the images have 3 channels"},
    {{x, y, mean = {1, 1 / 0, 1}}, "data: mean must be finite, but channel 2 has inf"},
    {{x, y, std = -1 / 0}, "data: std must be finite, but channel 1 has -inf"},
    {{lt.zeros({4, 0, 2, 3}), y},
     "data: images must have at least one pixel and one channel, but are 4x0x2x3 f32"},
    {{x, y, std = {1, 0, 1}}, "data.set: std must be positive, but channel 2 has 0"},
    {{x, y, std = "1"}, "data.set: 'std' must be a number or a list of numbers, but is '1'"},
    {{lt.zeros({4, 1, 1, 5}), y, mean = 0.5},
     "data.set: mean and std require at most 4 channels, but the images have 5"},
    {{lt.zeros({0, 1, 1}), lt.zeros({0}, {dtype = "u8"})}, "data.set: there are no images"},
    {{x, lt.zeros({3}, {dtype = "u8"})},
     "data: labels must have one axis of 4, the number of images, but are 3 u8"},
    {{x, lt.zeros({4})}, "data: labels must be u8, i32 or i64, but are f32"},
    {{lt.zeros({4, 6}), y},
     "data: images must have axes (n, h, w) or (n, h, w, c), but are 4x6 f32"},
  }
  for _, case in ipairs(cases) do
    T.fails(function() lt.data.set(case[1]) end, case[2])
  end
end)

-- ==== Synthetic ==================================================================================

T.test("synthetic", function()
  local train, test = lt.data.open "synthetic:6x5x3/4"
  T.equal({#train, #test, train.classes}, {10000, 1000, 4})
  T.equal({train.height, train.width, train.channels}, {6, 5, 3})
  local x, y = train:open_batches{batch = 6}:next()
  T.equal(x.shape, {6, 6, 5, 3})
  T.equal(y:totable(), {0, 1, 2, 3, 0, 1})
  differ(x:totable(), test:open_batches{batch = 6}:next():totable())
  train, test = lt.data.open "synthetic:6x5x1/4/7"
  T.equal({#train, #test}, {7, 1})
  for _, text in ipairs{"", "6x5/4", "6x5x3", "6x5x3/4/", "6x5x3/4/7/8", "-6x5x3/4",
                       "6x5x3/99999999999999999999"} do
    T.fails(function() lt.data.open("synthetic:" .. text) end,
            "synthetic must be HxWxC/CLASSES or HxWxC/CLASSES/COUNT, as in synthetic:32x32x3/10, "
            .. "but is '" .. text .. "'")
  end
  T.fails(function() lt.data.open "synthetic:6x5x9/4" end,
          "synthetic data: images must have 1 to 4 channels, but have 9")
end)

-- ==== Image files ================================================================================

local function crc32(text)
  local crc = 0xffffffff
  for _, byte in ipairs{text:byte(1, -1)} do
    crc = crc ~ byte
    for _ = 1, 8 do crc = crc >> 1 ~ (crc & 1) * 0xedb88320 end
  end
  return ~crc & 0xffffffff
end

-- A PNG of side x side pixels of one colour, {r, g, b}, without compression.
local function png(side, colour)
  local function chunk(name, body)
    return (">I4"):pack(#body) .. name .. body .. (">I4"):pack(crc32(name .. body))
  end
  local rows = ("\0" .. string.char(table.unpack(colour)):rep(side)):rep(side)
  local a, b = 1, 0
  for _, byte in ipairs{rows:byte(1, -1)} do a = (a + byte) % 65521; b = (b + a) % 65521 end
  return "\137PNG\r\n\26\n" .. chunk("IHDR", (">I4I4"):pack(side, side) .. "\8\2\0\0\0")
         .. chunk("IDAT", "\x78\1\1" .. ("<I2I2"):pack(#rows, ~#rows & 0xffff) .. rows
                          .. (">I2I2"):pack(b, a))
         .. chunk("IEND", "")
end

local function make(path) assert(os.execute("mkdir -p " .. folder .. "/" .. path)) end

-- Writes n images per class to folder/part. The colour of image i of class k is {10 k, i, 0}.
local function write_classes(part, classes, n, side)
  for k, class in ipairs(classes) do
    make(part .. "/" .. class)
    for i = 1, n do
      write(("%s/%s/%d.png"):format(part, class, i), png(side, {10 * (k - 1), i, 0}))
    end
  end
end

T.test("one image", function()
  write("red.png", png(4, {255, 0, 0}))
  local x = lt.data.image(folder .. "/red.png")
  T.equal({x.shape, x.dtype}, {{4, 4, 3}, "u8"})
  T.equal(x:totable()[1][1], {255, 0, 0})
  T.equal(lt.data.image(folder .. "/red.png", 1).shape, {4, 4, 1})
  T.fails(function() lt.data.image(folder .. "/red.png", 2) end,
          "data.image: channels must be 1 or 3, but is 2")
  assert(not pcall(lt.data.image, folder .. "/none.png"))
end)

T.test("images in folders", function()
  T.fails(function() lt.data.open "images" end,
          "images requires a folder: images:DIR, with DIR/train/CLASS/*.jpg and DIR/val or "
          .. "DIR/test")
  local what = "images:" .. folder .. "/photos"
  local function missing(part)
    T.fails(function() lt.data.open(what) end,
            ("images: %s/photos must have the folders train, and val or test, each with a "
            .. "folder per class, but has no %s"):format(folder, part))
  end
  missing "train"
  write_classes("photos/train", {"cat", "dog"}, 3, 8)
  missing "val or test"
  write_classes("photos/test", {"cat", "dog"}, 1, 6)
  local train, test = lt.data.open(what, {size = 5})
  T.equal({#train, #test, train.classes, train.names}, {6, 2, 2, {"cat", "dog"}})
  T.equal({train.height, train.width, train.channels, train.images}, {5, 5, 3})
  T.equal(train.augment, {area = 0.08, flip = true})
  local x, y = train:open_batches{batch = 6, dtype = "u8"}:next()
  T.equal(y:totable(), {0, 0, 0, 1, 1, 1})
  T.equal(x:totable()[5][5][5], {10, 2, 0})
  x = train:open_batches{batch = 6, dtype = "u8", area = 0.1, flip = true}:next()
  T.equal(x:totable()[5][5][5], {10, 2, 0})
  T.equal(lt.data.open(what).height, 224)
  local cropped, cropped_test = lt.data.open(what, {size = 5, center_crop = 0.5})
  T.equal({cropped.center_crop, cropped_test.center_crop, train.center_crop}, {0.5, 0.5, nil})
  T.equal(cropped:open_batches{batch = 6, dtype = "u8"}:next():totable()[5][5][5], {10, 2, 0})
  T.fails(function() lt.data.open(what, {center_crop = 0}) end,
          "data.open: 'center_crop' must be a fraction above 0 and up to 1, but is 0")

  local small = train:sized(4)
  T.equal({small.height, small.width, small.classes, small.names, #small, small.augment},
          {4, 4, 2, train.names, 6, train.augment})
  T.equal(train:sized(5), train)
  T.equal(train:sized(nil), train)
  for _, o in ipairs{{batch = 6}, {batch = 6, area = 0.3, flip = true}} do
    local wanted = lt.data.open(what, {size = 4}):open_batches(o):next()
    T.equal(small:open_batches(o):next():totable(), wanted:totable())
    T.equal(small:sized(5):sized(4):open_batches(o):next():totable(), wanted:totable())
  end

  make "photos/test/bird"
  write("photos/test/bird/1.png", png(4, {0, 0, 0}))
  T.fails(function() lt.data.open(what) end,
          ("%s/photos/test has a class 'bird', but %s/photos/train does not")
          :format(folder, folder))
  os.execute(("rm -r %s/photos/test/bird %s/photos/test/cat"):format(folder, folder))
  T.fails(function() lt.data.open(what) end,
          ("%s/photos/train has a class 'cat', but %s/photos/test does not"):format(folder, folder))
end)

T.test("the error of an image that cannot be read names it", function()
  write("photos/train/cat/2.png", "nothing")
  os.execute(("cp -r %s/photos/train/cat %s/photos/test"):format(folder, folder))
  local train = lt.data.open("images:" .. folder .. "/photos", {size = 4})
  T.raises(folder .. "/photos/train/cat/2.png", function()
    for _ in train:batches{batch = 2} do end
  end)
end)

T.test("a pass that has failed fails again", function()
  make "bad/train/a"
  make "bad/test/a"
  for i = 1, 8 do write(("bad/train/a/%d.png"):format(i), png(4, {i, 0, 0})) end
  write("bad/train/a/4.png", "")
  write("bad/test/a/1.png", png(4, {0, 0, 0}))
  local train = lt.data.open("images:" .. folder .. "/bad", {size = 4})
  for workers = 0, 2 do
    local pass <close> = train:open_batches{batch = 2, workers = workers}
    T.equal(#pass:next(), 2)
    for _ = 1, 6 do
      T.fails(function() pass:next() end,
              folder .. "/bad/train/a/4.png: cannot decode: the file is empty")
    end
  end
end)

-- ==== CIFAR-10 ===================================================================================

-- Writes n records; record i has label i % 10 and pixels {i, 2 i, 3 i}.
local function write_cifar(file, n)
  local records = {}
  for i = 1, n do
    local planes = {}
    for c = 1, 3 do planes[c] = string.char(c * i):rep(1024) end
    records[i] = string.char(i % 10) .. table.concat(planes)
  end
  write(file, table.concat(records))
end

T.test("CIFAR-10 as binary files", function()
  T.fails(function() lt.data.open "cifar10" end, "cifar10 requires a folder: cifar10:DIR")
  local what = "cifar10:" .. folder .. "/cifar"
  make "cifar/cifar-10-batches-bin"
  T.fails(function() lt.data.open(what) end,
          ("cifar10: found neither %s/cifar/data_batch_1.bin nor %s/cifar/train; the former "
          .. "is in https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz")
          :format(folder, folder))
  for i = 1, 5 do write_cifar(("cifar/cifar-10-batches-bin/data_batch_%d.bin"):format(i), i) end
  write_cifar("cifar/cifar-10-batches-bin/test_batch.bin", 12)
  for _, where in ipairs{what, what .. "/cifar-10-batches-bin"} do
    local train, test = lt.data.open(where)
    T.equal({#train, #test, train.classes, #train.names}, {15, 12, 10, 10})
    T.equal({train.height, train.width, train.channels}, {32, 32, 3})
    T.equal(train.augment, {crop = 4, flip = true})
    T.equal(train.images:totable()[15][32][32], {5, 10, 15})
    T.equal(test.labels:totable(), {1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2})
    T.near(test:open_batches{batch = 1}:next():get(1, 1, 1, 3), (3 / 255 - 0.4465) / 0.2616, 1e-5)
  end
  write("cifar/cifar-10-batches-bin/data_batch_3.bin", ("x"):rep(3072))
  T.raises("cifar-10-batches-bin/data_batch_3.bin", lt.data.open, what)
end)

T.test("CIFAR-10 as folders", function()
  local classes = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}
  local what = "cifar10:" .. folder .. "/jpg"
  write_classes("jpg/train", classes, 2, 32)
  write_classes("jpg/test", classes, 1, 32)
  local train, test = lt.data.open(what)
  T.equal({#train, #test, train.classes, train.names}, {20, 10, 10, classes})
  T.equal({train.images.shape, train.images.dtype}, {{20, 32, 32, 3}, "u8"})
  T.equal(train.images:totable()[8][32][32], {30, 2, 0})
  T.equal(test.labels:totable(), {0, 1, 2, 3, 4, 5, 6, 7, 8, 9})

  os.execute(("rm -r %s/jpg/test/j"):format(folder))
  T.fails(function() lt.data.open(what) end,
          ("cifar10: %s/jpg/test must have 10 classes, but has 9; use images:DIR for others")
          :format(folder))
  write_classes("jpg/test", classes, 1, 16)
  T.fails(function() lt.data.open(what) end,
          ("cifar10: the images of %s/jpg/test must be 32x32, but are 16x16; use images:DIR for "
          .. "others"):format(folder))
  write("jpg/train/c/2.png", png(31, {0, 0, 0}))
  T.fails(function() lt.data.open(what) end,
          ("%s/jpg/train/c/2.png has 31x31 pixels (height x width), but the first image has "
          .. "32x32; set a size to which all images are resized"):format(folder))
end)

T.finish()
