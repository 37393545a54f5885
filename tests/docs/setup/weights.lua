-- weights.lua - the saved weights of a run, and images for the net.
local lt = require "luatrain"
os.execute "mkdir -p runs/x"
lt.save("runs/x/weights.safetensors", lt.models.lenet{})
return {lt = lt, images = lt.zeros{2, 28, 28, 1}}
