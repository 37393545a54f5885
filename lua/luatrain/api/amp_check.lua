-- amp_check.lua - lt.amp.check and --amp-check: the error of half precision in one pass.
--
--   local result = require "luatrain.api.amp_check".check(fn, ...)
--
-- fn is the function of a step. It is called twice, each time up to the end of its first backward
-- pass: once as it is and once in f32. Both calls are dry runs: weights, gradients, statistics,
-- random numbers and the scaler do not change. But side effects of the script itself before that
-- backward, such as a call of math.random, happen twice more. All tensors that ops make are
-- compared.
--
-- result      {scale = , loss = , loss_f32 = , underflow = , overflow = , layers = {...}}
-- layers      a list of {layer = "net.conv1", output = , input_grad = , param_grad = ,
--             underflow = , overflow = } in forward order; an op outside modules has its own name
--
-- output, input_grad and param_grad are relative errors |half - f32| / |f32|, each over all tensors
-- of its kind in the layer. underflow is the fraction of elements that were too small and became 0,
-- overflow the fraction that is not finite. For a layer, they are the highest of its tensors; for
-- the whole result, the fractions of all gradient elements. Gradients are compared with the loss
-- scale applied. With several ranks, each rank checks its own shard of the batch.

local core = ...

local amp_check = {}

local function fail(...) core.fail("EINVAL", string.format(...)) end

-- value with four significant digits.
local function rounded(value) return tonumber(("%.4g"):format(value)) + 0.0 end

-- The name of a row's layer: "net.4" for "train.lua:9: net.4 ", or its op outside modules.
local function layer_of(row)
  local module = (row.where:match "^.-:%d+: (.*)$" or row.where):match "^(.-)%s*$"
  return module ~= "" and module or row.op
end

local KINDS = {output = "output", input_grad = "gradient of its input",
               param_grad = "gradients of its parameters"}

local function kind_of(row)
  return not row.of and "output" or row.leaf and "param_grad" or "input_grad"
end

-- A layer's entry before its first row. squares: for each kind, sums of |half - f32|^2 and |f32|^2.
local function new_layer(name)
  local layer = {layer = name, underflow = 0.0, overflow = 0.0, squares = {}}
  for kind in pairs(KINDS) do layer.squares[kind] = {off = 0.0, all = 0.0} end
  return layer
end

-- Keeps value in worst[what] if it is the largest so far.
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

-- Computes each error over all tensors of a kind in the layer. An error per tensor would mislead: a
-- gradient that should be 0, such as the gradient of a bias before a batch norm, is all rounding
-- error.
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

-- Returns the layers; the worst error, underflow and overflow; and the sums of underflows,
-- overflows and count over all gradients.
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

-- Returns the result described above, and the worst values for text().
function amp_check.check(fn, ...)
  if type(fn) ~= "function" then fail("amp check requires a function, but got %s", tostring(fn)) end
  local check <close> = core.new_precision_check()
  local loss = check:pass(false, fn, ...)
  if not check:half() then
    fail "amp check: the function computes nothing in half precision; run it under lt.autocast"
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

-- The line that the log shows for a check.
function amp_check.text(step, result, worst)
  return ("amp check at step %d, scale %.14g: loss %s, in f32 %s; worst %s, %s, %s"):format(
    step, result.scale, loss_text(result.loss), loss_text(result.loss_f32),
    worst_text(worst, "error"), worst_text(worst, "underflow"), worst_text(worst, "overflow"))
end

-- Called before each step of a run. If --amp-check is due, runs amp_check.check on fn and logs an
-- event and a line.
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
  run.mark = run.mark + (core.clock() - before)      -- excludes the check from the step's time
end

return amp_check
