-- test_lenet.lua - LeNet step by step beside PyTorch's.
local lt = require "luatrain"
local follow = require "trajectory"

follow("lenet", lt.models.lenet, 0.005)
