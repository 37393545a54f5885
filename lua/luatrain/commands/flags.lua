-- flags.lua - parses the options of a subcommand, which precede its other arguments.

local core = ...
local check = require "luatrain.check"
local sorted = require "luatrain.keys"

-- Parses the options in list into o. known[name] is {description of the value, function that
-- converts its text, or returns false or nil if it is invalid}; or true for a switch. help: the
-- text of --help. refuse(format, ...) raises the error. Returns the index of the first argument
-- after the options.
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
      text = list[i] or refuse("--%s requires a value", name)
    end
    local value = wants == true or wants[2](text)
    if not value then refuse("--%s must be %s, but is '%s'", name, wants[1], text) end
    o[name], i = value, i + 1
  end
  return i
end
