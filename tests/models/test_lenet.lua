-- test_lenet.lua - compares the training of LeNet with PyTorch, step by step.
local lt = require "luatrain"
local follow = require "trajectory"

follow("lenet", lt.models.lenet, 0.005)
