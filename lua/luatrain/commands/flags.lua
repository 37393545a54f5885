-- flags.lua - the options of a subcommand, which stand before its other arguments.

local core = ...
local check = require "luatrain.check"
local sorted = require "luatrain.keys"

-- Reads them from list into o. known has what each wants, in words, and a function that gives its
-- value for a text, or nothing; true for one without a value. refuse(format, ...) fails. Returns
-- which argument is the first after them.
return function(list, known, o, help, refuse)
  local i = 1
  while (list[i] or ""):sub(1, 1) == "-" do
    local name, text = list[i]:match "^%-%-([%w-]*)=?(.*)$"
    local wants = known[name]
    if name == "help" then
      print(help)
      core.fail("EDONE", "the help is shown")
    elseif not wants then
      local names = sorted(known)
      for k = 1, #names do names[k] = "--" .. names[k] end
      refuse("unknown option '%s'%s", list[i], check.hint(list[i], names, " (--help lists them)"))
    elseif wants == true and list[i]:find("=", 1, true) then
      refuse("--%s takes no value", name)
    elseif wants ~= true and not list[i]:find("=", 1, true) then
      i = i + 1
      text = list[i] or refuse("--%s wants a value", name)
    end
    local value = wants == true or wants[2](text)
    if not value then refuse("--%s wants %s, it is '%s'", name, wants[1], text) end
    o[name], i = value, i + 1
  end
  return i
end
