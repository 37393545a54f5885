-- tensor_sizes.lua - prints how fragmented the gradients of a net are, as a line of JSON: their
-- number and bytes in f32, and the same for tensors of less than 64 KiB.
--
--   luatrain tensor_sizes.lua --arch resnet50
local lt = require "luatrain"
local json = require "luatrain.json"

local opt = lt.args{arch = "resnet50", help = {arch = "net from lt.models"}}
local net = lt.models[opt.arch]{}
local r = {tensors = 0, bytes = 0, small = 0, small_bytes = 0}
for _, p in ipairs(net:parameters()) do
  local bytes = 4 * p:count()
  r.tensors, r.bytes = r.tensors + 1, r.bytes + bytes
  if bytes < 1 << 16 then r.small, r.small_bytes = r.small + 1, r.small_bytes + bytes end
end
print(json.text(r))
