-- nets.lua NAME - one image of 224 x 224 through a net of the training scripts.
package.path = "models/?.lua;" .. package.path
local lt = require "luatrain"
local name = ...
local stem = name:match "^vgg" or name:match "^resnet" or name
local net = require(stem)[name]{}
lt.no_grad(function() net(lt.zeros{1, 224, 224, 3}) end)
