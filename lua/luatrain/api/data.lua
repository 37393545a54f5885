-- data.lua - data sets of labelled images, and passes over them in batches.
--
--   local train, test = lt.data.open "fashion-mnist"           -- or "fashion-mnist:DIR"
--   local mine = lt.data.set{images = x, labels = y}           -- (n, h, w, c) and (n)
--   for x, y in train:batches{batch = 64, shuffle = true, epoch = 1} do ... end
--
-- x is (n, h, w, c), normalised; y is (n), classes counted from 0. The order of the images is a
-- function of seed and epoch. The augmentation of an image is a function of seed, epoch and image.

local core = ...
local check = require "luatrain.check"
local hooks = require "luatrain.hooks"

local data = {}

-- A path or a name as messages show it: control characters become "?", and only the end of a long
-- one is shown, as in ".../DIR/NAME.jpg".
local function shown(value)
  if type(value) ~= "string" then return value end
  local text = value:gsub("\xc2[\x80-\x9f]", "?"):gsub("%c", "?")
  if #text <= 200 then return text end
  text = text:sub(-200)
  return "..." .. (text:match "/.*" or text:gsub("^[\x80-\xbf]+", ""))
end

local function format(text, ...)
  local values = table.pack(...)
  for i = 1, values.n do values[i] = shown(values[i]) end
  return text:format(table.unpack(values, 1, values.n))
end

local function fail(...) core.fail("EDATA", format(...)) end
local function refuse(...) core.fail("EINVAL", format(...)) end

-- ==== Sets =======================================================================================
--
-- A set has the fields count (also #set), classes, names, height, width, channels, mean and std
-- (lists of one number per channel), center_crop (see data.open; or nil), augment (the usual
-- augmentation of such images, as options of batches) and, if they are in memory, images and
-- labels.

local Set = require "luatrain.arity".methods("set:", "luatrain.Set")
local set_meta = {__index = Set, __name = "luatrain.Set"}

-- Checks value, a number or a list of one number per channel. Returns it as a list. name is for
-- errors.
local function per_channel(name, value, channels)
  local list = type(value) == "table" and value or {}
  if type(value) == "number" then
    for c = 1, channels do list[c] = value end
  end
  if #list ~= channels then
    refuse("data: %s has %d numbers, but the images have %d channels", name, #list, channels)
  end
  for c, number in ipairs(list) do
    if not math.type(number) or number - number ~= 0 then          -- inf, nan
      refuse("data: %s must be finite, but channel %d has %s", name, c, number)
    end
  end
  return list
end

local batches = check("batches{batch; shuffle=false, epoch=1, first=0, dtype=f32, crop=0, "
                      .. "flip=false, area=1.0, workers?:integer, shard=false, grain:count=1, "
                      .. "on_request=false}")

local function open_batches(set, o)
  if o.area <= 0 then                              -- to the core, 0 would mean the whole image
    refuse("batches: 'area' must be a fraction above 0 and up to 1, but is %g", o.area)
  end
  if o.on_request and o.shard then
    refuse "batches: on_request cannot be combined with shard"
  end
  if core.profile_rows then            -- see profile.lua
    core.profile_batch = core.profile_batch or o.batch
    o.batch = math.min(o.batch, core.profile_rows)
  end
  if o.workers == 0 then o.workers = -1 end        -- no workers; to the core, 0 is the default
  o.center_crop = set.center_crop
  return core.new_batches(set.source, o, per_channel("mean", set.mean, set.channels),
                          per_channel("std", set.std, set.channels))
end

-- Opens a pass over the set. pass:next() returns x and y, or nil at the end; the pass yields each
-- image once, and the last batch may be smaller. The pass also has pass:stats() and pass:close().
-- With shard = true, it yields only this rank's shard of each batch, or the batch's first image if
-- the shard is empty. Groups of `grain` consecutive images of a batch stay on one rank.
-- With on_request = true, it yields only the batches that pass:request(first) requests, in that
-- order. first is the position of the batch's first image in the epoch, counted from 0.
function Set:open_batches(given) return open_batches(self, batches(given)) end

-- for x, y in set:batches{...} do: the same pass as an iterator. It has no closing value, because a
-- `break` in Lua 5.4.4 may not close it; the garbage collector frees an unfinished pass. A shuffled
-- pass is for training and implies shard: each rank gets its shard of every batch, or with --vranks
-- its shards one after the other.
function Set:batches(given)
  local o = batches(given)
  if o.on_request then refuse "batches: on_request requires set:open_batches" end
  if o.shuffle and hooks.is_async() then return hooks.batches(self, o, open_batches) end
  o.shard = o.shard or o.shuffle
  local pass, left, shares = open_batches(self, o), self.count - o.first, core.share_changes()
  if not o.shard then return pass.next, pass end
  local parts, part, digest = 0, 0, hooks.digest(self)
  return function()
    if part == 0 and shares ~= core.share_changes() then       -- of the ranks: see share.lua
      pass:close()
      o.first, shares = self.count - math.max(left, 0), core.share_changes()
      pass = open_batches(self, o)
    end
    local x, y = pass:next()
    if part == 0 then parts = core.shards(math.min(o.batch, math.max(left, 0)), o.grain) end
    part = part + 1
    if not x then core.end_shard() return end
    core.take_shard(math.min(o.batch, left), part, o.grain, digest)
    if part == parts then part, left = 0, left - o.batch end
    return x, y
  end
end

function set_meta.__len(self) return self.count end

local function new_set(source, set)
  set.source, set.count = source, source:count()
  set.height, set.width, set.channels = source:shape()
  set.mean = per_channel("mean", set.mean or 0.0, set.channels)
  set.std = per_channel("std", set.std or 1.0, set.channels)
  set.augment = set.augment or {}
  return setmetatable(set, set_meta)
end

local function check_center_crop(who, value)
  if value and not (value > 0) then                -- to the core, 0 would mean the whole image
    refuse("%s: 'center_crop' must be a fraction above 0 and up to 1, but is %g", who, value)
  end
  return value
end

local sized = check "set:sized(size, {; center_crop?:share})"

-- Returns a set with the same images resized to size x size; they must be u8. Returns the set
-- itself if size is nil or the images already have this size. center_crop requires a size: see
-- data.open. It defaults to the set's center_crop.
function Set:sized(size, given)
  local crop = check_center_crop("set:sized", sized(given).center_crop)
  if crop and not size then
    refuse("set:sized: center_crop requires a size, since it only applies to images that are "
           .. "resized")
  end
  crop = crop or self.center_crop
  if not size or self.height == size and self.width == size then return self end
  local pixels = type(size) == "number" and math.tointeger(size)
  if not pixels then
    refuse("set:sized requires a whole number of pixels, but got %s", check.shown(size))
  end
  return new_set(core.source_sized(self.source, pixels), {
    names = self.names, classes = self.classes, labels = self.labels, mean = self.mean,
    std = self.std, augment = self.augment, center_crop = crop})
end

-- Checks that each label is a class. Returns the number of classes; if `classes` is nil, it is the
-- highest label + 1. where names the source of the labels in errors.
local function check_labels(where, labels, classes)
  local highest, i, label = core.scan_labels(labels, classes or math.maxinteger)
  if i and classes then
    fail("%s: label %d of %d is %d, but the %d classes are 0 to %d", where, i, #labels, label,
         classes, classes - 1)
  elseif i then
    fail("%s: label %d of %d is %d, but classes count from 0", where, i, #labels, label)
  end
  return classes or highest + 1
end

local function in_memory(where, images, labels, set)
  local source = core.source_tensors(images, labels)
  if source:count() == 0 then fail("%s: there are no images", where) end
  set.images, set.labels = images:keep(), labels:keep()
  return new_set(source, set)
end

local own = check("data.set{images:tensor, labels:tensor; classes?, names?:names, mean?:numbers, "
                  .. "std?:numbers}")

-- A set of your own. images: (n, h, w, c) or (n, h, w), u8 or a float dtype; labels: (n), of an
-- integer dtype. Both are kept. u8 pixels are divided by 255, floats are used as they are; both are
-- then normalised by mean and std, each a number or a list of one number per channel.
function data.set(given)
  local o = own(given)
  local classes = o.classes or o.names and #o.names
  if o.names and #o.names ~= classes then
    refuse("data.set: there are %d names for %d classes", #o.names, classes)
  end
  local set = in_memory("data.set", o.images, o.labels,
                        {names = o.names, mean = o.mean, std = o.std})
  if set.channels > 4 and (o.mean or o.std) then
    refuse("data.set: mean and std require at most 4 channels, but the images have %d",
           set.channels)
  end
  for c, value in ipairs(set.std) do
    if value <= 0 then
      refuse("data.set: std must be positive, but channel %d has %g", c, value)
    end
  end
  set.classes = check_labels("data.set", o.labels, classes)
  return set
end

-- Reads a JPEG or PNG file. Returns a u8 tensor (h, w, channels). channels: 1 or 3, the default.
function data.image(path, channels)
  if channels ~= nil and channels ~= 1 and channels ~= 3 then
    refuse("data.image: channels must be 1 or 3, but is %s", channels)
  end
  return core.read_image(path, channels or 3)
end

-- ==== Reading ====================================================================================

local function exists(path)
  local there, why = core.exists(path)
  if why then fail("cannot check whether %s exists: %s", path, why) end
  return there
end

-- EDATA unless the training and the test set have the same classes.
local function same_classes(train, test, train_path, test_path)
  local all = {}
  for _, name in ipairs(train.names) do all[name] = true end
  for _, name in ipairs(test.names) do
    if not all[name] then
      fail("%s has a class '%s', but %s does not", test_path, name, train_path)
    end
    all[name] = nil
  end
  local missing = next(all)
  if missing then
    fail("%s has a class '%s', but %s does not", train_path, missing, test_path)
  end
end

-- ---- Fashion-MNIST ----

local fashion_names = {"T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt",
                       "sneaker", "bag", "boot"}

local function read_idx(folder, file)
  for _, path in ipairs{folder .. "/" .. file .. ".gz", folder .. "/" .. file} do
    if exists(path) then return core.read_idx(path), path end
  end
  fail("fashion-mnist: %s/%s.gz is missing; run 'apt-get install dataset-fashion-mnist', or name a "
       .. "folder that has it: --data fashion-mnist:DIR", folder, file)
end

local function read_fashion(folder, part)
  local images = read_idx(folder, part .. "-images-idx3-ubyte")
  local labels, path = read_idx(folder, part .. "-labels-idx1-ubyte")
  if #images.shape ~= 3 or #labels.shape ~= 1 or #images ~= #labels then
    local has, have = core.describe(images), core.describe(labels)
    fail("fashion-mnist: %s/%s-*: images %s and labels %s do not match",
         folder, part, has, have)
  end
  return in_memory(folder .. "/" .. part .. "-*", images, labels, {
    names = fashion_names, classes = check_labels(path, labels, #fashion_names),
    mean = 0.2860, std = 0.3530,                   -- values of the training images, scaled to 0..1
    augment = {flip = true}})
end

local function open_fashion(folder)
  if folder == "" then folder = "/usr/share/datasets/fashion-mnist" end
  return read_fashion(folder, "train"), read_fashion(folder, "t10k")
end

-- ---- CIFAR-10 ----

local cifar_names = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse",
                     "ship", "truck"}

local function cifar_set(where, images, labels, names)
  return in_memory(where, images, labels, {
    names = names, classes = #cifar_names, augment = {crop = 4, flip = true},
    mean = {0.4914, 0.4822, 0.4465}, std = {0.2470, 0.2435, 0.2616}})
end

local function read_cifar_files(folder, ...)
  local paths = {}
  for i, file in ipairs{...} do paths[i] = folder .. "/" .. file end
  local images, labels = core.read_cifar10(paths)
  return cifar_set(folder, images, labels, cifar_names)
end

-- Decodes all images in a folder of class folders into memory.
local function read_cifar_folder(folder)
  local source = core.source_folder(folder, 0, 0, 3)
  local height, width = source:shape()
  local names = source:names()
  if height ~= 32 or width ~= 32 then
    fail("cifar10: the images of %s must be 32x32, but are %dx%d; use images:DIR for others",
         folder, height, width)
  end
  if #names ~= #cifar_names then
    fail("cifar10: %s must have %d classes, but has %d; use images:DIR for others", folder,
         #cifar_names, #names)
  end
  local all <close> = core.new_batches(source, {batch = source:count(), dtype = "u8"}, {}, {})
  local images, labels = all:next()
  return cifar_set(folder, images, labels, names)
end

local function open_cifar10(folder)
  if folder == "" then fail "cifar10 requires a folder: cifar10:DIR" end
  for _, inner in ipairs{folder, folder .. "/cifar-10-batches-bin"} do
    if exists(inner .. "/data_batch_1.bin") then
      return read_cifar_files(inner, "data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                              "data_batch_4.bin", "data_batch_5.bin"),
             read_cifar_files(inner, "test_batch.bin")
    end
  end
  local paths = {folder .. "/train", folder .. "/test"}
  if not exists(paths[1]) then
    fail("cifar10: found neither %s/data_batch_1.bin nor %s/train; the former is in "
         .. "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", folder, folder)
  end
  local train, test = read_cifar_folder(paths[1]), read_cifar_folder(paths[2])
  same_classes(train, test, paths[1], paths[2])
  return train, test
end

-- ---- Folders of images, which are read from disk for each batch ----

local function open_folder(path, size)
  local source = core.source_folder(path, size, size, 3)
  local names = source:names()
  return new_set(source, {
    names = names, classes = #names, augment = {area = 0.08, flip = true},
    mean = {0.485, 0.456, 0.406}, std = {0.229, 0.224, 0.225}})      -- values of ImageNet
end

local function open_images(folder, size)
  if folder == "" then
    fail "images requires a folder: images:DIR, with DIR/train/CLASS/*.jpg and DIR/val or DIR/test"
  end
  local train_path, test_path = folder .. "/train", folder .. "/val"
  if not exists(test_path) then test_path = folder .. "/test" end
  if not exists(train_path) or not exists(test_path) then
    fail("images: %s must have the folders train, and val or test, each with a folder per class, "
         .. "but has no %s", folder, exists(train_path) and "val or test" or "train")
  end
  local train, test = open_folder(train_path, size), open_folder(test_path, size)
  same_classes(train, test, train_path, test_path)
  return train, test
end

-- ---- Synthetic ----

local function open_synthetic(text)
  local numbers = {text:match "^(%d+)x(%d+)x(%d+)/(%d+)$"}
  if #numbers == 0 then numbers = {text:match "^(%d+)x(%d+)x(%d+)/(%d+)/(%d+)$"} end
  local good = #numbers > 0
  for i, digits in ipairs(numbers) do
    numbers[i] = tonumber(digits)
    good = good and math.type(numbers[i]) == "integer"     -- 20 digits would give a float
  end
  local height, width, channels, classes, count = table.unpack(numbers)
  if not good then
    fail("synthetic must be HxWxC/CLASSES or HxWxC/CLASSES/COUNT, as in synthetic:32x32x3/10, but "
         .. "is '%s'", text)
  end
  local function open(part, n)
    local ok, source = pcall(core.source_synthetic, part, n, height, width, channels, classes)
    if not ok then core.fail("EDATA", (source:gsub("^[^:\n]*:%d+: ", ""))) end
    return new_set(source, {classes = classes, mean = 0.5, std = 0.2})
  end
  count = count or 10000
  return open(0, count), open(1, math.max(count // 10, 1))
end

-- ==== By name ====================================================================================

local sources = {
  ["fashion-mnist"] = open_fashion, cifar10 = open_cifar10, images = open_images,
  synthetic = open_synthetic,
}
local names = {"fashion-mnist", "cifar10", "images", "synthetic"}
local forms = "fashion-mnist[:DIR], cifar10:DIR, images:DIR, synthetic:HxWxC/CLASSES[/COUNT]"

local options = check "data.open{; size?, center_crop?:share}"

-- lt.data.open(what[, {size = 224}]): opens the data set named `what`, in one of the forms above.
-- Returns the training set and the test set. Images of images:DIR are resized to size x size.
-- center_crop = 0.875, as in most ImageNet results, first crops them to 7/8 of the height and width
-- of the largest square in the centre, like Resize(256) and CenterCrop(224) of torchvision. Without
-- it, whole images are resized. It does not apply to random crops (area), nor to images that need
-- no resizing.
function data.open(what, given)
  local name, rest = tostring(what):match "^([^:]*):?(.*)$"
  local o = options(given)
  local size, crop = o.size, check_center_crop("data.open", o.center_crop)
  local open = sources[name]
  if not open then
    fail("unknown data '%s'%s", name, check.hint(name, names, (" (known: %s)"):format(forms)))
  end
  if size and name ~= "images" then
    refuse("data.open: size is only for images:DIR; the images of %s have a fixed size", what)
  end
  local train, test = open(rest, size or 224)
  train.center_crop, test.center_crop = crop, crop
  return train, test
end

return check.strict(data, "data")
