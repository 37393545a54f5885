-- arity.lua - raises an error for a call with more arguments than the function has parameters. Lua
-- would drop them silently. Trailing nils do not count.
--
--   local Run = arity.methods "run:"            a table; functions put into it are checked
--   arity.functions(nn, "nn.")                  the functions in a table
--   arity.of(core.seed, "lt.seed", {"n"})       a C function, whose parameters have no names
--
-- Functions with varargs are left as they are.

local core = ...

local arity = {}

-- What a message calls a parameter, where the name says nothing.
local says = {given = "a table"}

local function count(...)
  local n = select("#", ...)
  while n > 0 and (select(n, ...)) == nil do n = n - 1 end
  return n
end

-- The names of the parameters of a Lua function after the first `skip`; nil if it has varargs. C
-- functions have no parameter names.
local function parameters_of(fn, skip)
  local info = debug.getinfo(fn, "u")
  if info.isvararg then return nil end
  local names = {}
  for i = skip + 1, info.nparams do names[i - skip] = debug.getlocal(fn, i) end
  return names
end

arity.parameters_of = parameters_of

-- A message if there are more arguments than names, else nil.
local function excess(who, names, ...)
  local n = count(...)
  if n <= #names then return nil end
  local list = {}
  for i, name in ipairs(names) do list[i] = says[name] or name end
  local takes = #list == 0 and "no argument"
                or ("%d argument%s (%s)"):format(#list, #list > 1 and "s" or "",
                                                table.concat(list, ", "))
  return ("%s takes %s, it was given %d"):format(who, takes, n)
end

arity.excess = excess

-- fn with a check. If the last parameter is a table of options, fn itself refuses other types: it
-- knows the options.
local function with_check(fn, who, names, skip)
  local most, last = #names + skip, names[#names]
  local asks = last == "given" or last == "options"
  return function(...)
    if select("#", ...) > most then
      local options = asks and select(most, ...)
      local wrong = (not options or type(options) == "table")
                    and excess(who, names, select(skip + 1, ...))
      if wrong then core.fail("EINVAL", wrong) end
    end
    return fn(...)
  end
end

function arity.of(fn, who, names) return with_check(fn, who, names, 0) end
-- The same for a method, or a __call.
function arity.of_method(fn, who, names) return with_check(fn, who, names, 1) end

-- fn with a check, if it names its parameters. prefix: what a message puts before the name, "nn."
-- of a function, "net:" of a method.
local function checked(fn, prefix, name)
  local skip = prefix:sub(-1) == ":" and 1 or 0
  local names = type(fn) == "function" and parameters_of(fn, skip)
  return names and with_check(fn, prefix .. name, names, skip) or fn
end

-- All functions of a table.
function arity.functions(functions, prefix)
  for name, fn in next, functions do functions[name] = checked(fn, prefix, name) end
end

-- A table for methods that are to come.
function arity.methods(prefix)
  return setmetatable({}, {__newindex = function(methods, name, fn)
    rawset(methods, name, checked(fn, prefix, name))
  end})
end

return arity
