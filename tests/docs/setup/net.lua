-- net.lua - a net.
lt = require "luatrain"
net = lt.models.lenet{}
