-- data.lua - sources of images with labels, and batches of them.
--
--   local train, test = lt.data.open "fashion-mnist"           -- or "fashion-mnist:DIR"
--   for x, y in train:batches{batch = 64, shuffle = true, epoch = 1} do ... end
--
-- x is (n, h, w, c), normalised; y (n), classes counted from 0. The order of an epoch is a
-- function of seed and epoch.

local core = ...
local check = require "luatrain.check"

local data = {}

local sources = {
  ["fashion-mnist"] = {
    package = "dataset-fashion-mnist",
    folder = "/usr/share/datasets/fashion-mnist",
    mean = 0.2860, std = 0.3530,                   -- of the training images, from 0 to 1
    names = {"T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
             "boot"},
  },
}

-- ==== Sets =======================================================================================

local Set = {}
local set_meta = {__index = Set, __name = "luatrain.Set"}

local batches = check "batches{batch; shuffle=false, epoch=1, dtype=f32}"

-- An iterator over x, y: each image once, the last batch may be smaller.
function Set:batches(given)
  local o = batches(given)
  local handle = core.new_batches(self.images, self.labels, o.batch, o.shuffle, o.epoch, o.dtype,
                                  self.mean, self.std)
  return handle.next, handle, nil, handle
end

function set_meta.__len(self) return self.count end

-- ==== Reading ====================================================================================

local function exists(path)
  local file = io.open(path, "rb")
  if file then file:close() end
  return file ~= nil
end

local function fail(...) core.fail("EDATA", string.format(...)) end

local function read_idx(source, name, folder, file)
  for _, path in ipairs{folder .. "/" .. file .. ".gz", folder .. "/" .. file} do
    if exists(path) then return core.read_idx(path) end
  end
  fail("%s: there is no %s/%s.gz; 'apt-get install %s' brings it, or name a folder that has it: "
       .. "--data %s:DIR", name, folder, file, source.package, name)
end

local function read_set(source, name, folder, part)
  local images = read_idx(source, name, folder, part .. "-images-idx3-ubyte")
  local labels = read_idx(source, name, folder, part .. "-labels-idx1-ubyte")
  if #images.shape ~= 3 or #labels.shape ~= 1 or #images ~= #labels then
    local has, have = core.describe(images), core.describe(labels)
    fail("%s: %s/%s-*: there are images %s and labels %s, which do not belong together", name,
         folder, part, has, have)
  end
  return setmetatable({
    images = images:keep(), labels = labels:keep(), count = #labels, names = source.names,
    classes = #source.names, mean = source.mean, std = source.std}, set_meta)
end

-- The training set and the test set. Each has images (u8), labels (u8), count, classes and names.
function data.open(what)
  local name, folder = tostring(what):match "^([^:]*):?(.*)$"
  local source = sources[name]
  if not source then
    local names = {}
    for known in pairs(sources) do names[#names + 1] = known end
    local others = (" (there is %s)"):format(table.concat(names, ", "))
    fail("unknown data '%s'%s", name, check.hint(name, names, others))
  end
  if folder == "" then folder = source.folder end
  return read_set(source, name, folder, "train"), read_set(source, name, folder, "t10k")
end

return check.strict(data, "data")
