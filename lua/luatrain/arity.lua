-- arity.lua - raises an error for a call with more arguments than the function has parameters. Lua
-- would drop them silently. Trailing nils do not count.
--
--   local Run = arity.methods("run:", "luatrain.Run")   a new table that checks each method put
--                                               into it, and that calls have a colon
--   arity.functions(nn, "nn.")                  checks all functions of a table
--   arity.of(core.seed, "lt.seed", {"n"})       checks a C function, given its parameters' names
--
-- Functions with varargs are left unchanged.

local core = ...

local arity = {}

-- How messages call a parameter whose name would mean nothing to the user.
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

-- Returns an error message if there are more arguments than names, else nil. who: the function.
local function excess(who, names, ...)
  local n = count(...)
  if n <= #names then return nil end
  local list = {}
  for i, name in ipairs(names) do list[i] = says[name] or name end
  local accepts = #list == 0 and "no arguments"
                  or ("%d argument%s (%s)"):format(#list, #list > 1 and "s" or "",
                                                  table.concat(list, ", "))
  return ("%s accepts %s, got %d"):format(who, accepts, n)
end

arity.excess = excess

-- Wraps fn, which takes `skip` unnamed arguments (self) before the named ones, in the check. If the
-- last parameter is a table of options and the call passes another type, fn runs and raises the
-- error itself, because it can name the options.
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
-- Like arity.of, for a method or a __call, whose first argument is self.
function arity.of_method(fn, who, names) return with_check(fn, who, names, 1) end

-- Wraps fn in the check if it names its parameters, else returns fn. Messages put prefix before the
-- name: "nn." for a function, "net:" for a method.
local function checked(fn, prefix, name)
  local skip = prefix:sub(-1) == ":" and 1 or 0
  local names = type(fn) == "function" and parameters_of(fn, skip)
  return names and with_check(fn, prefix .. name, names, skip) or fn
end

-- Replaces all functions of a table by checked ones.
function arity.functions(functions, prefix)
  for name, fn in next, functions do functions[name] = checked(fn, prefix, name) end
end

-- A new table that wraps each method in the check when it is assigned. A method must be called with
-- a colon: its first argument must have a metatable with this __name.
function arity.methods(prefix, class)
  return setmetatable({}, {__newindex = function(methods, name, fn)
    fn = checked(fn, prefix, name)
    rawset(methods, name, function(self, ...)
      local meta = type(self) == "table" and getmetatable(self)
      if not meta or meta.__name ~= class then
        local who = prefix .. name
        core.fail("EINVAL", who .. " must be called with a colon: " .. who .. "(...)")
      end
      return fn(self, ...)
    end)
  end})
end

return arity
