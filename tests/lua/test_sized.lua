-- test_sized.lua - sets with the images of another set in another size.
local lt = require "luatrain"
local T = require "lt_test"

T.test("a set of images in a tensor, resized", function()
  local x = lt.zeros({2, 8, 8, 1}, {dtype = "u8"})
  for row = 1, 8 do
    for column = 1, 8 do x:set(1, row, column, 1, 30 * row) end
  end
  local set = lt.data.set{images = x, labels = lt.tensor({1, 0}, {dtype = "u8"})}:sized(4)
  local y, labels = set:open_batches{batch = 2, dtype = "u8"}:next()
  T.equal({y.shape, labels:totable(), set.height, set.classes}, {{2, 4, 4, 1}, {1, 0}, 4, 2})
  local rows = y:totable()[1]
  T.near(rows[2][2][1], 105, 0.5)           -- the whole image: row 3.5 and row 5.5 of 8
  T.near(rows[3][2][1], 165, 0.5)
  local middle = set:sized(5):sized(4, {center_crop = 0.875})
  local function read(s) return s:open_batches{batch = 2, dtype = "u8"}:next():totable()[1] end
  rows = read(middle)
  for row = 1, 4 do                         -- the middle 7 rows become 4; edges are less exact
    T.near(rows[row][2][1], 30 * (1.5 + 1.75 * (row - 0.5)) - 15, 4)
  end
  T.equal({middle.center_crop, set.center_crop}, {0.875, nil})
  T.equal(read(middle:sized(3):sized(4)), rows)        -- resized sets keep it
  T.fails(function() set:sized(5, {center_crop = 0}) end,
          "set:sized: 'center_crop' must be a fraction above 0 and up to 1, but is 0")
  T.fails(function() set:sized(5, {center_crop = 2}) end,
          "set:sized: 'center_crop' must be a number from 0 to 1, but is 2")
  T.fails(function() set:sized(nil, {center_crop = 0.5}) end,
          "set:sized: center_crop requires a size, since it only applies to images that are "
          .. "resized")
  T.fails(function() set:sized(4, {width = 2}) end,
          "set:sized: unknown key 'width': set:sized(size, {center_crop?})")
  T.equal(set:sized(), set)
  T.fails(function() lt.data.set{images = lt.zeros{1, 2, 2, 1}, labels = lt.zeros({1},
                                 {dtype = "u8"})}:sized(4) end,
          "data: only u8 images can be resized, to 1x1 to 16384x16384; these are f32, and the "
          .. "size is 4x4")
  for size, text in pairs{[0.5] = "0.5", [1 / 0] = "inf", ["6"] = "'6'", [true] = "true"} do
    T.fails(function() set:sized(size) end,
            "set:sized requires a whole number of pixels, but got " .. text)
  end
  T.equal(set:sized(6.0).height, 6)
end)

T.finish()
