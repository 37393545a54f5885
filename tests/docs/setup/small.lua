-- small.lua - a net and small images. lt.fit trains with 1/8 of the image size and 1/64 of the
-- batch, one epoch per size.
local lt = require "luatrain"
local nn = lt.nn
local train, test = lt.data.open "synthetic:16x16x3/10/128"
local net = nn.sequential{nn.conv2d{3, 8, 3, stride = 2}, nn.batch_norm{8}, lt.relu,
                          lt.global_avg_pool2d, nn.flatten(), nn.linear{8, 10}}

local fit = lt.fit
rawset(lt, "fit", function(settings)
  settings.epochs, settings.accumulate = #settings.sizes, settings.accumulate // 4
  settings.batch = settings.batch // 64
  for _, stage in ipairs(settings.sizes) do
    stage.epochs, stage.size = stage.epochs and 1, stage.size // 8
    stage.batch = stage.batch and stage.batch // 64
  end
  return fit(settings)
end)

return {lt = lt, train = train, test = test, net = net}
