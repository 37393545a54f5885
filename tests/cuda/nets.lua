-- nets.lua NAME - runs one image of 224 x 224 through a net; test_plans.c records the ops.
package.path = "models/?.lua;" .. package.path
local lt = require "luatrain"
local name = ...
local module = name:match "^vgg" or name:match "^resnet" or name
local net = require(module)[name]{}
lt.no_grad(function() net(lt.zeros{1, 224, 224, 3}) end)
