-- test_resnet20.lua - compares the training of ResNet-20 with PyTorch, step by step. The fixture's
-- net is one list of blocks: its blocks.4.conv3.w is stage2.1.shortcut.1.w here.
local lt = require "luatrain"
local follow = require "trajectory"

local function fixture_name(name)
  local stage, block, rest = name:match "^stage(%d)%.(%d)%.(.*)$"
  if not stage then return name end
  rest = rest:gsub("^shortcut%.1", "conv3"):gsub("^shortcut%.2", "bn3")
  return ("blocks.%d.%s"):format(3 * (stage - 1) + block, rest)
end

follow("resnet20", lt.models.resnet20, 0.0001, fixture_name)
