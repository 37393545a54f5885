-- optims.lua - the optimizers of a run: their checks, settings and names in checkpoints. The names
-- of the first one have no prefix: "lr". Those of the second begin with "optim2.": "optim2.lr".

local core = ...

local optims = {}

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- ==== Checks =====================================================================================

local SHOWN = 3

-- "1.w, 1.b, 2.w and 4 more"
local function text_of(names)
  local text = table.concat(names, ", ", 1, math.min(#names, SHOWN))
  local more = #names - SHOWN
  return more > 0 and ("%s and %d more"):format(text, more) or text
end
optims.text_of = text_of

-- The names of the parameters in a list of {name, tensor} that are not frozen and not in `set`.
local function missing(list, set)
  local names = {}
  for _, item in ipairs(list) do
    if item.tensor.on_tape and not set[item.tensor] then names[#names + 1] = item.name end
  end
  return names
end

local function set_of(list)
  local set = {}
  for _, item in ipairs(list) do set[item.tensor] = true end
  return set
end

-- EINVAL unless the optimizers of a run belong to its net. Returns a warning with the parameters of
-- the net that no optimizer has, though they are not frozen; nil if there are none.
function optims.check(net, list)
  local of_net, held, is_listed = {}, {}, {}
  for name, tensor in net:named_parameters() do
    of_net[#of_net + 1] = {name = name, tensor = tensor}
  end
  local in_net = set_of(of_net)
  for _, optim in ipairs(list) do
    if is_listed[optim] then fail "lt.run: an optimizer is given twice" end
    is_listed[optim] = true
    local has_one = false
    for _, item in ipairs(core.inner_of(optim).parameters) do
      held[#held + 1], has_one = item, has_one or in_net[item.tensor]
    end
    if not has_one then
      fail "lt.run: the optimizer has no parameter of the net; it was made for another net"
    end
  end
  local outside, left = missing(held, in_net), missing(of_net, set_of(held))
  if #outside > 0 and #left > 0 then
    fail("lt.run: the optimizer has %s, which the net does not have, and the net has %s, which no "
         .. "optimizer has; make the optimizer after the last change of the net", text_of(outside),
         text_of(left))
  elseif #outside > 0 then
    fail("lt.run: the optimizer has %s, which the net does not have, so the run would not save "
         .. "them; make them part of the net", text_of(outside))
  elseif #left > 0 then
    return ("no optimizer has %s, so this part of the net keeps its values; freeze() it if that "
            .. "is intended"):format(text_of(left))
  end
end

-- Called when an optimizer steps inside run:step. Returns the log for its warnings, or nil. EINVAL
-- if it is not one of the run.
function optims.expect(run, optim)
  for _, own in ipairs(run.settings.optims) do
    if own == optim then
      run.stepped[optim] = true
      return run.root and run.log or nil
    end
  end
  run.mode:refuse_optimizer(optim)
end

-- Called at the end of run:step. Discards the gradients that a backward after an optimizer's step
-- has left: checkpoints do not have them. EINVAL if an optimizer with gradients has not stepped.
function optims.end_step(run)
  for _, optim in ipairs(run.settings.optims) do
    if core.inner_of(optim).handle:has_grads() then
      if not run.stepped[optim] then
        fail("run:step: its function left gradients of an %s that took no step, and a resumed run "
             .. "would not have them; step, discard them with zero_grad(), or freeze() or detach() "
             .. "what this loss must not train", optim:class())
      end
      optim:zero_grad()
    end
  end
end

-- ==== Names ======================================================================================

-- For each optimizer, the names of its parameters in the net, in order: "body.w,body.b". The names
-- inside an optimizer are numbers, or start at the part of the net that it was made for, so they do
-- not show whether a checkpoint has the same parameters.
function optims.held(net, list)
  local names, all = {}, {}
  for name, tensor in net:named_parameters() do names[tensor] = name end
  for i, optim in ipairs(list) do
    local own = {}
    for k, item in ipairs(core.inner_of(optim).parameters) do
      own[k] = names[item.tensor] or item.name
    end
    all[i] = table.concat(own, ",")
  end
  return all
end

-- EFILE unless optims.held() equals the list in a checkpoint, `saved`. Older checkpoints have none.
function optims.check_held(net, list, saved, path)
  for i, held in ipairs(optims.held(net, list)) do
    local was = saved[tostring(i)]
    if was and was ~= held then
      local texts = {}
      for k, names in ipairs{was, held} do
        local words = {}
        for word in names:gmatch "[^,]+" do words[#words + 1] = word end
        texts[k] = text_of(words)
      end
      core.fail("EFILE", ("%s was made with an %s of %s in place %d of 'optim', but now that "
                          .. "optimizer has %s; make the optimizers with the same parameters in "
                          .. "the same order, or start a new run with another --out")
                         :format(path, list[i]:class(), texts[1], i, texts[2]))
    end
  end
end

-- The prefix of the tensors of optimizer i in checkpoints.
function optims.prefix(i) return i == 1 and "optim." or ("optim%d."):format(i) end

-- The names of their constructors: "optim.adam" or "optim.adam, optim.sgd".
function optims.classes(list)
  local names = {}
  for i, optim in ipairs(list) do names[i] = optim:class() end
  return table.concat(names, ", ")
end

-- All settings by name.
function optims.settings(list)
  local all = {}
  for i, optim in ipairs(list) do
    for name, value in pairs(optim:settings()) do
      all[(i == 1 and "" or optims.prefix(i)) .. name] = value
    end
  end
  return all
end

-- Sets a setting by its name in settings(). Does nothing if its optimizer does not exist.
function optims.set(list, name, value)
  local i, own = name:match "^optim(%d+)%.(.*)$"
  local optim = list[math.tointeger(i or 1)]
  if optim then optim:set(own or name, value) end
end

return optims
