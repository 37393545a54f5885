-- hooks.lua - what api/ calls of train/, which replaces these functions. They do nothing without
-- training on several ranks.

return {
  -- Called for a new optimizer. inner: see core.inner_of; what: what it was made for; who: the name
  -- of its constructor; settings: by name.
  new_optim = function(_inner, _what, _who, _settings) end,
  -- Called before an optimizer step.
  begin_step = function(_inner) end,
  -- Called before an optimizer of a class loads a state and its number of steps.
  load_optim = function(_class, _steps, _state) end,
  -- Returns a digest of a set, which all ranks compare.
  digest = function(_set) return 0 end,
  -- Whether passes over shuffled batches train asynchronously; then batches(set, o, open) returns
  -- the iterator of one.
  is_async = function() return false end,
  batches = function(_set, _o, _open) end,
}
