-- torch.lua - a file with the weights of a small net as PyTorch names and arranges them.
local lt = require "luatrain"
lt.save("torch.safetensors", {
  ["conv.weight"] = lt.randn{8, 3, 3, 3}, ["conv.bias"] = lt.randn{8},
  ["bn.weight"] = lt.randn{8}, ["bn.bias"] = lt.randn{8},
  ["bn.running_mean"] = lt.randn{8}, ["bn.running_var"] = lt.ones{8},
  ["fc.weight"] = lt.randn{10, 288}, ["fc.bias"] = lt.randn{10}})
return {lt = lt, nn = lt.nn}
