-- net.lua - a net.
local lt = require "luatrain"
return {lt = lt, net = lt.models.lenet{}}
