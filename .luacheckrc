-- Settings of luacheck. `luacheck .` prints no warning.
std = "lua54"
max_line_length = 100
self = false -- a method need not use its object
include_files = {"**/*.lua"}
exclude_files = {".deps", "build*"}
ignore = {
  "431", -- a local may have the name of an upvalue
  "512", -- a loop may return in its first round
  "581", -- not (x <= y) is also true for NaN
}

-- These replace functions of Lua.
files["lua/luatrain/train/exits.lua"] = {globals = {"coroutine", "os", "pcall", "xpcall"}}
files["lua/luatrain/train/log.lua"] = {globals = {"print"}}
files["lua/luatrain/commands/profile.lua"] = {globals = {"print"}}
files["lua/luatrain/train/ranks.lua"] = {globals = {"print"}}
files["lua/luatrain/train/sources.lua"] = {globals = {"dofile", "loadfile"}}
files["tests/lua/test_args.lua"] = {globals = {"arg"}}

-- Some variables only keep a value alive, or let it go.
files["tests/lua/test_run.lua"] = {ignore = {"231", "241", "311"}}
