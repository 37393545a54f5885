-- amp_check.lua - lt.amp.check and --amp-check: what half precision does to one pass of a script.
--
--   local result = require "luatrain.api.amp_check".check(fn, ...)
--
-- fn is the function of a step. It is called twice up to the end of its first backward, once as it
-- is and once in f32, and nothing that the library knows of changes by it: weights, gradients,
-- statistics, random numbers, the scaler. What the script itself does before that backward, as a
-- number from math.random, happens twice more. Each tensor that an op makes is compared.
--
-- result      {scale = , loss = , loss_f32 = , underflow = , overflow = , layers = {...}}
-- layers      {layer = "net.conv1", output = , input_grad = , param_grad = , underflow = ,
--             overflow = } each, in the order of forward; what is in no module has the op's name
--
-- output, input_grad and param_grad are errors: |half - f32| / |f32|, of all such tensors of a
-- layer together. underflow is the share of numbers that have become 0 for being too small,
-- overflow of those that are no longer finite; of a layer those of the tensor that has most, of the
-- whole those of all gradients. Gradients have the loss scale in them. Of several ranks each looks
-- at its own part of the batch.

local core = ...

local amp_check = {}

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- Four digits say enough.
local function rounded(value) return tonumber(("%.4g"):format(value)) + 0.0 end

-- "train.lua:9: net.4 " as "net.4".
local function layer_of(row)
  local module = (row.where:match "^.-:%d+: (.*)$" or row.where):match "^(.-)%s*$"
  return module ~= "" and module or row.op
end

local KINDS = {output = "output", input_grad = "gradient of its input",
               param_grad = "gradients of its parameters"}

local function kind_of(row)
  return not row.of and "output" or row.leaf and "param_grad" or "input_grad"
end

-- What a layer is known by so far.
local function new_layer(name)
  local layer = {layer = name, underflow = 0.0, overflow = 0.0, squares = {}}
  for kind in pairs(KINDS) do layer.squares[kind] = {off = 0.0, all = 0.0} end
  return layer
end

-- value is the worst of its kind if it is larger than those before.
local function compare(worst, what, value, layer, kind)
  if value > (worst[what] and worst[what].value or 0) then
    worst[what] = {value = value, layer = layer.layer, kind = kind}
  end
end

local function add_row(layer, row, worst)
  local kind = kind_of(row)
  local squares = layer.squares[kind]
  squares.off = squares.off + (row.error * row.norm) ^ 2
  squares.all = squares.all + row.norm ^ 2
  for _, what in ipairs{"underflow", "overflow"} do
    local share = row[what .. "s"] / row.count
    layer[what] = math.max(layer[what], rounded(share))
    compare(worst, what, share, layer, kind)
  end
end

-- The errors of what its tensors of a kind are together: one that should be 0, as the gradient of a
-- bias before a batch norm, is nothing but rounding.
local function add_errors(layer, worst)
  for kind, squares in pairs(layer.squares) do
    if squares.all > 0 then
      local off = math.sqrt(squares.off / squares.all)
      layer[kind] = rounded(off)
      compare(worst, "error", off, layer, kind)
    end
  end
  layer.squares = nil
end

-- The layers; the worst by error, underflow and overflow; underflows, overflows and count of all
-- gradients.
local function sum_up(rows)
  local layers, by_name, worst = {}, {}, {}
  local all = {underflows = 0, overflows = 0, count = 0}
  for _, row in ipairs(rows) do
    local name = layer_of(row)
    if row.count > 0 then
      if not by_name[name] then
        by_name[name] = new_layer(name)
        layers[#layers + 1] = by_name[name]
      end
      add_row(by_name[name], row, worst)
    end
    if row.of then
      for key in pairs(all) do all[key] = all[key] + row[key] end
    end
  end
  for _, layer in ipairs(layers) do add_errors(layer, worst) end
  return layers, worst, all
end

-- See above. The second result is what text() wants.
function amp_check.check(fn, ...)
  if type(fn) ~= "function" then fail("amp check wants a function, it is %s", tostring(fn)) end
  local check <close> = core.new_precision_check()
  local loss = check:pass(false, fn, ...)
  if not check:half() then
    fail "amp check: nothing in the function is computed in half precision; lt.autocast does that"
  end
  local loss_f32 = check:pass(true, fn, ...)
  local layers, worst, all = sum_up(check:rows())
  local count = math.max(all.count, 1)
  return {scale = core.loss_scale(), loss = loss, loss_f32 = loss_f32, layers = layers,
          underflow = rounded(all.underflows / count), overflow = rounded(all.overflows / count)},
         worst
end

local function worst_text(worst, what)
  local w = worst[what]
  if not w then return "no " .. what end
  local percent = 100 * w.value
  return ("%s %s %% in %s (%s)"):format(what, (percent < 99.5 and "%.2g" or "%.0f"):format(percent),
                                        w.layer, KINDS[w.kind])
end

local function loss_text(loss) return loss ~= loss and "nan" or ("%.6g"):format(loss) end

-- A line for people.
function amp_check.text(step, result, worst)
  return ("amp check at step %d, scale %.14g: loss %s, in f32 %s; at most %s, %s, %s"):format(
    step, result.scale, loss_text(result.loss), loss_text(result.loss_f32),
    worst_text(worst, "error"), worst_text(worst, "underflow"), worst_text(worst, "overflow"))
end

-- Before a step of a run, where --amp-check wants it: as amp_check.check, with an event and a line.
function amp_check.begin_step(run, fn, ...)
  local o, before = run.settings, core.clock()
  if not o.amp_check or run.steps % o.amp_check > 0 or o.trial or o.amp == "off" then return end
  local _ <close> = setmetatable({}, {__close = function() run.inside = false end})
  local function check(...)
    return amp_check.check(core.step, core.autocast, o.amp, fn, ...)
  end
  run.inside = true
  core.take_shard(run.rows, run.shard, run.grain)
  local result, worst
  if o.scaler then
    result, worst = o.scaler:inside(check, ...)
  else
    result, worst = check(...)
  end
  result.step = run.steps + 1
  run.log:event("amp_check", result)
  run.log:note(amp_check.text(result.step, result, worst))
  run.mark = run.mark + (core.clock() - before)      -- it is no part of the step
end

return amp_check
