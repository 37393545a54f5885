-- photo.lua - an image file, the data sets of a folder and a net for them.
local lt = require "luatrain"
local nn = lt.nn
os.execute "cp $(ls DIR/train/*/*.png | head -1) photo.png"
local train, test = lt.data.open("images:DIR", {size = 32})
local net = nn.sequential{nn.conv2d{3, 4, 3}, lt.global_avg_pool2d, nn.flatten(),
                          nn.linear{4, train.classes}}
return {lt = lt, net = net, test = test}
