---@meta luatrain
-- The public API, for lua-language-server. Made by tools/annotations.lua; do not edit it.

---@alias luatrain.DType 'f32'|'f64'|'f16'|'bf16'|'i64'|'i32'|'u8'
---@alias luatrain.Precision 'off'|'bf16'|'fp16'
---@alias luatrain.Schedule fun(epoch: number, epochs: number): number
---@alias luatrain.Report table<string, number>
---@alias luatrain.Parameters luatrain.Module|luatrain.Tensor[]|{params: luatrain.Module|luatrain.Tensor[], [string]: any}[]
---@alias luatrain.Maker {dtype?: luatrain.DType, device?: string}

---@class luatrain.Tensor
---@field shape integer[]
---@field dtype luatrain.DType
---@field device string
---@field grad luatrain.Tensor
---@field on_tape boolean
---@operator add(luatrain.Tensor|number): luatrain.Tensor
---@operator sub(luatrain.Tensor|number): luatrain.Tensor
---@operator mul(luatrain.Tensor|number): luatrain.Tensor
---@operator div(luatrain.Tensor|number): luatrain.Tensor
---@operator pow(luatrain.Tensor|number): luatrain.Tensor
---@operator unm: luatrain.Tensor
---@operator len: integer
local Tensor = {}

---Computes the gradients of the leaves and adds them to leaf.grad.
---@param gradient? luatrain.Tensor
function Tensor:backward(gradient) end

---Overwrites the elements; returns the tensor.
---@param source luatrain.Tensor
---@return luatrain.Tensor
function Tensor:copy(source) end

---The number of elements.
---@return integer
function Tensor:count() end

---A view that is not on the tape.
---@return luatrain.Tensor
function Tensor:detach() end

---The length of an axis; -1 is the last.
---@param axis integer
---@return integer
function Tensor:dim(axis) end

---Sets every element; returns the tensor.
---@param value number
---@return luatrain.Tensor
function Tensor:fill(value) end

---The element at these indices, from 1.
---@param ... integer
---@return number
function Tensor:get(...) end

---The value of a tensor of one element.
---@return number
function Tensor:item() end

---Keeps the tensor beyond the step that made it.
---@return luatrain.Tensor
function Tensor:keep() end

---Calls hook when backward has computed the gradient of a leaf.
---@param hook fun(gradient: luatrain.Tensor)
function Tensor:on_grad(hook) end

---Makes it a leaf that collects a gradient.
---@param on? boolean
---@return luatrain.Tensor
function Tensor:requires_grad(on) end

---Sets the element at the indices, from 1, to the last argument.
---@param ... number
function Tensor:set(...) end

---A copy on a device; a view if it is there already.
---@param device string
---@return luatrain.Tensor
function Tensor:to(device) end

---The elements as nested lists, or one number.
---@return any
function Tensor:totable() end

---Drops the gradient.
function Tensor:zero_grad() end

---@class luatrain.Module
---@field training boolean
---@field [string|integer] any
---@overload fun(...: any): luatrain.Tensor, any ...
local Module = {}

---The number of elements of all parameters.
---@return integer
function Module:count() end

---Sets eval mode. First synchronizes batch norm's running statistics with pending steps.
---@return luatrain.Module
function Module:eval() end

---Freezes all parameters: they get no gradients and no updates. freeze(false) unfreezes them.
---@param on? boolean
---@return luatrain.Module
function Module:freeze(on) end

---Loads a file of lt.save(path, net). EFILE unless all names and shapes match.
---@param path string
---@return luatrain.Module
function Module:load(path) end

---@return fun(): string, luatrain.Tensor
function Module:named_buffers() end

---for name, p in net:named_parameters() do ... end
---@return fun(): string, luatrain.Tensor
function Module:named_parameters() end

---The list of all parameters in order, each once.
---@return luatrain.Tensor[]
function Module:parameters() end

---SHA-256 of all parameters and buffers, as a string of hexadecimal digits.
---@return string
function Module:sha256() end

---The names and tensors that lt.save writes: all parameters and buffers, each once.
---@return string[]
---@return luatrain.Tensor[]
function Module:state() end

---Sets the dtype of all parameters and buffers. Must be called before they have memory.
---@param dtype luatrain.DType
---@return luatrain.Module
function Module:to(dtype) end

---@return luatrain.Module
function Module:train() end

function Module:zero_grad() end

---@class luatrain.Optim
---@field groups table[]
---@field grad_norm? number
---@field lr number
---@field beta1 number
---@field beta2 number
---@field eps number
---@field weight_decay number
---@field decay_bias boolean
---@field clip number
---@field lr_factor number
---@field momentum number
---@field trust number
---@field nesterov boolean
local Optim = {}

---The name of its constructor: "optim.sgd".
---@return string
function Optim:class() end

---Whether this optimizer updates a tensor.
---@param tensor luatrain.Tensor
---@return boolean
function Optim:has(tensor) end

---Copies a state of state() into this optimizer. optim:load(lt.load(path)) works: the metadata is
---ignored. All ranks must call this together, with the same state.
---@param state table<string, luatrain.Tensor>
---@param _? any
function Optim:load(state, _) end

---Sets a setting by its name in settings(). Does nothing if its group does not exist. nil removes a
---group's override.
---@param name string
---@param value any
function Optim:set(name, value) end

---@return table<string, any>
function Optim:settings() end

---Returns a flat table of tensors for lt.save: "v.conv1.w" is slot v of parameter conv1.w; "steps"
---is the number of applied steps. The slots are the optimizer's own tensors, not copies.
---@return table<string, luatrain.Tensor>
function Optim:state() end

---Takes one step for all parameters that have a gradient. Returns the step status: "applied";
---"skipped", by a loss scale (lt.amp); "accumulating", if more shards of the batch follow
---(--vranks); or "pending", on an accelerator, which decides asynchronously whether to apply it;
---scaler.skipped later counts it if it was skipped. Drops the gradients unless accumulating.
---@return 'applied'|'skipped'|'accumulating'|'pending'
function Optim:step() end

function Optim:zero_grad() end

---@class luatrain.Set
---@field count integer
---@field classes integer
---@field names? string[]
---@field height integer
---@field width integer
---@field channels integer
---@field mean number[]
---@field std number[]
---@field augment luatrain.augment.Options
---@field images luatrain.Tensor
---@field labels luatrain.Tensor
---@operator len: integer
local Set = {}

---for x, y in set:batches{...} do: the same pass as an iterator. It has no closing value, because a
---`break` in Lua 5.4.4 may not close it; the garbage collector frees an unfinished pass. A shuffled
---pass is for training and implies shard: each rank gets its shard of every batch, or with --vranks
---its shards one after the other.
---@param given luatrain.batches.Options
---@return fun(pass?: luatrain.Batches): luatrain.Tensor, luatrain.Tensor
---@return luatrain.Batches?
function Set:batches(given) end

---Opens a pass over the set. pass:next() returns x and y, or nil at the end; the pass yields each
---image once, and the last batch may be smaller. The pass also has pass:stats() and pass:close().
---With shard = true, it yields only this rank's shard of each batch, or the batch's first image if
---the shard is empty. Groups of `grain` consecutive images of a batch stay on one rank.
---@param given luatrain.batches.Options
---@return luatrain.Batches
function Set:open_batches(given) end

---Returns a set with the same images resized to size x size; they must be u8. Returns the set
---itself if size is nil or the images already have this size.
---@param size? integer
---@return luatrain.Set
function Set:sized(size) end

---@class luatrain.Batches
local Batches = {}

---Frees the pass.
function Batches:close() end

---The next batch: images and labels; nil at the end.
---@return luatrain.Tensor
---@return luatrain.Tensor
function Batches:next() end

---Seconds and counts of the loader.
---@return table
function Batches:stats() end

---@class luatrain.Run
---@field folder string
---@field epoch integer
---@field steps integer
---@field stage {size?: integer, batch: integer, area: number}
---@field result luatrain.Report
local Run = {}

---for x, y in run:batches() do: iterates over the rest of this epoch, shuffled and augmented. Each
---batch requires one run:step. The loop has no closing value, because `break` in Lua 5.4.4 may not
---close it; the next call on the run closes a loader that was left open.
---@return fun(): luatrain.Tensor, luatrain.Tensor
function Run:batches() end

---for epoch in run:epochs() do: iterates over the remaining epochs. Reports an epoch that the
---script did not report. After the last epoch, completes the run.
---@return fun(): integer
function Run:epochs() end

---run:evaluate(set[, {batch = , loss = , metrics = }]): returns {loss = , top1 = } of the net in
---eval mode over the set, each sample counted once. batch defaults to the training batch, which
---needs no more memory than training. metrics: see metrics.lua. Images are resized to the stage's.
---@param set luatrain.Set
---@param given? {batch?: integer, loss?: function, metrics?: luatrain.metric.Options[]}
---@return luatrain.Report
function Run:evaluate(set, given) end

---run:mixup(x, y): lt.mixup with the run's setting `mixup` as alpha. The setting also makes the run
---keep pairs of images on one rank. For use in the function of run:step.
---@param x luatrain.Tensor
---@param y luatrain.Tensor
---@return luatrain.Tensor
---@return luatrain.Tensor
---@return number
function Run:mixup(x, y) end

---run:report(numbers): ends the epoch. Logs it with numbers, a table by name such as run:evaluate
---returns, saves a checkpoint, and returns the report: the numbers and train_loss.
---@param numbers? luatrain.Report
---@return luatrain.Report
function Run:report(numbers) end

---Saves a checkpoint now.
function Run:save() end

---run:step(fn, ...): one training step. Calls fn(...) as lt.step does. fn runs the forward and
---backward pass, takes the optimizer's step and returns the loss, a mean over the batch. run:step
---then logs, saves if due and stops if requested. Returns the loss as a number; with --vranks, the
---shard's loss until the last shard of the batch. On an accelerator, a loss that fn returned as a
---tensor is returned unchanged, without waiting for it.
---@param fn function
---@param ... any
---@return number|luatrain.Tensor
function Run:step(fn, ...) end

---@class luatrain.Scaler
---@field scale number
---@field last_scale number
---@field headroom? number
---@field steps integer
---@field skipped integer
local Scaler = {}

---Returns the scale of step `number`, its headroom in bits (nil if its gradients were not finite or
---all zero), and the number of steps skipped up to it. Only the last eight steps are kept; for
---another number, or nil, these are the values of the last step.
---@param number? integer
---@return number
---@return number?
---@return integer
function Scaler:at(number) end

---Puts this scale in use for all backward passes and optimizer steps until close(). EINVAL if
---another scaler is in use. All ranks must call begin, and load, together.
---@return luatrain.Scaler
function Scaler:begin() end

function Scaler:close() end

---Compares the scaler's state over all ranks. All ranks update it with the same votes at each step,
---so states that are equal once stay equal.
function Scaler:compare() end

---Calls fn(...) with this scale in use and returns its results. Restores the previous scale
---afterwards, also after an error.
---@param fn function
---@param ... any
---@return any ...
function Scaler:inside(fn, ...) end

---The number of the last step that was submitted. Does not block.
---@return integer
function Scaler:latest() end

---@param state table<string, number>
function Scaler:load(state) end

---Loads the state of a scaler that was made with other settings; the settings of this scaler apply.
---changed[name] is true for each setting that differs. If the scale differs, it restarts from this
---scaler's initial scale, with its counts of consecutive good and skipped steps at 0.
---@param state table<string, number>
---@param changed table<string, boolean>
function Scaler:load_but(state, changed) end

---The settings that it was made with. growth_interval is nil unless the policy is dynamic.
---@return table
function Scaler:settings() end

---The whole state, as a flat table of numbers.
---@return table<string, number>
function Scaler:state() end

---@class luatrain.Spec
---@field name string
---@field usage string
---@overload fun(given?: table): table, string
local Spec = {}

---Checks a value for the argument `name` and returns it. EINVAL for an unknown name.
---@param name string
---@param value any
---@return any
function Spec:value(name, value) end

---@class luatrain
local lt = {}

---`abs(x)`
---
---y = |x| for each element of x; the gradient at 0 is 0.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.abs(x) end
Tensor.abs = lt.abs

---`add(x, y)`
---
---x + y; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.add(x, y) end
Tensor.add = lt.add

---@class luatrain.amp
lt.amp = {}

---Measures the error that half precision causes in one pass. fn runs a forward and a backward pass
---under lt.autocast, as the function of a step does. Returns a table of errors, underflow and
---overflow per layer, described in amp_check.lua. Has no effect on the training.
---
---  local found = lt.amp.check(lt.autocast, "fp16", function()
---    lt.cross_entropy(net(x), y):backward()
---  end)
---@param fn function
---@param ... any
---@return table
function lt.amp.check(fn, ...) end

---`amp.scaler{policy=adaptive, scale=65536.0, growth_interval=2000}`
---
---Creates a loss scaler and enables it until it is closed. Options: policy = "adaptive" (the
---default), "dynamic" or "static"; scale = 65536, the initial scale; growth_interval = 2000, in
---steps, for dynamic only. amp/amp.h describes the policies.
---@param options? luatrain.amp.scaler.Options
---@return luatrain.Scaler
function lt.amp.scaler(options) end

---arange(n) counts from 0 to n - 1; stop is excluded.
---@param first number
---@param stop? number|luatrain.Maker
---@param step? number|luatrain.Maker
---@param options? luatrain.Maker
---@return luatrain.Tensor
function lt.arange(first, stop, step, options) end

---@class luatrain.argmax.Options
---@field axis? integer|integer[] may be absent
---@field keep? boolean default: false

---`argmax(x; axis?, keep=false)`
---
---Index, from 0, of the largest element of x along an axis or of all elements; the first of equal ones, and a nan counts as largest.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.argmax.Options
---@param keep? boolean
---@return luatrain.Tensor
function lt.argmax(x, axis, keep) end
Tensor.argmax = lt.argmax

---lt.args(defaults): parses the command line and returns the values of all flags by name.
---@param defaults table
---@return table<string, any>
function lt.args(defaults) end

---lt.autocast("bf16", fn, ...): mixed precision; "off": none
---@param precision luatrain.Precision
---@param fn function
---@param ... any
---@return any ...
function lt.autocast(precision, fn, ...) end

---@class luatrain.avg_pool2d.Options
---@field kernel? integer|integer[] required
---@field stride? integer|integer[] default: kernel
---@field pad? integer|integer[] default: 0

---`avg_pool2d(x; kernel, stride=kernel, pad=0)`
---
---Mean over windows of x (n, h, w, c), to (n, oh, ow, c); padding counts as zeros in the mean, which is PyTorch's default.
---@param x luatrain.Tensor|number
---@param kernel? integer|integer[]|luatrain.avg_pool2d.Options
---@param stride? integer|integer[]
---@param pad? integer|integer[]
---@return luatrain.Tensor
function lt.avg_pool2d(x, kernel, stride, pad) end
Tensor.avg_pool2d = lt.avg_pool2d

---@class luatrain.batch_norm.Options
---@field train? boolean default: false
---@field momentum? number default: 0.1
---@field eps? number default: 1e-5
---@field act? 'none'|'relu'|'relu6' default: none
---@field sync? boolean default: false

---`batch_norm(x, scale, shift, mean, var, residual?; train=false, momentum=0.1, eps=1e-5, act=none|relu|relu6, sync=false)`
---
---y = act((x - mean) / sqrt(var + eps) * scale + shift + residual) for x (..., channels) and scale, shift, mean and var (channels); train=true takes mean and biased var from x (with sync=true, from x of all ranks) and updates the buffers mean and var by momentum at the end of the step.
---@param x luatrain.Tensor|number
---@param scale luatrain.Tensor|number
---@param shift luatrain.Tensor|number
---@param mean luatrain.Tensor|number
---@param var luatrain.Tensor|number
---@param residual? luatrain.Tensor|luatrain.batch_norm.Options
---@param train? boolean|luatrain.batch_norm.Options
---@param momentum? number
---@param eps? number
---@param act? 'none'|'relu'|'relu6'
---@param sync? boolean
---@return luatrain.Tensor
function lt.batch_norm(x, scale, shift, mean, var, residual, train, momentum, eps, act, sync) end
Tensor.batch_norm = lt.batch_norm

---@class luatrain.cast.Options
---@field dtype? luatrain.DType default: f32

---`cast(x; dtype=f32)`
---
---x converted to another dtype, rounded to nearest even; floats become integers by truncation and saturate.
---@param x luatrain.Tensor|number
---@param dtype? luatrain.DType|luatrain.cast.Options
---@return luatrain.Tensor
function lt.cast(x, dtype) end
Tensor.cast = lt.cast

---@class luatrain.cat.Options
---@field axis? integer|integer[] required

---`cat(x...; axis)`
---
---Tensors concatenated along one axis, in which alone their shapes may differ; in Lua, cat({a, b}, axis).
---@param x luatrain.Tensor|luatrain.Tensor[]
---@param ... luatrain.Tensor|integer|luatrain.cat.Options
---@return luatrain.Tensor
function lt.cat(x, ...) end
Tensor.cat = lt.cat

---@class luatrain.check
---@overload fun(text: string): luatrain.Spec
lt.check = {}

---Describes a value that a function returned: "a tensor f32 {2, 3}", "a nil".
---@param value any
---@return string
function lt.check.described(value) end

---" (did you mean 'near'?)" if one of names is close to word, else `otherwise`.
---@param word string
---@param names string[]
---@param otherwise any
---@return any
function lt.check.hint(word, names, otherwise) end

---Converts a value, a number or a tensor of one element, to a number. In errors, who names the
---function that returned it, and what says what it is.
---@param value luatrain.Tensor|number
---@param who string
---@param what string
---@return number
function lt.check.number(value, who, what) end

---@type string[]
lt.check.precisions = {}

---A value as messages show it.
---@param value any
---@return string
function lt.check.shown(value) end

---Makes a table of functions strict and returns it: reading an unknown name is an error, and so is
---a call with too many arguments. name is for errors; prefix: see arity.lua.
---@param functions table
---@param name string
---@param prefix? string
---@return table
function lt.check.strict(functions, name, prefix) end

---@class luatrain.clamp.Options
---@field min? number default: -inf
---@field max? number default: inf

---`clamp(x; min=-inf, max=inf)`
---
---y = min(max(x, min), max) for each element of x; the gradient is 0 except strictly between min and max.
---@param x luatrain.Tensor|number
---@param min? number|luatrain.clamp.Options
---@param max? number
---@return luatrain.Tensor
function lt.clamp(x, min, max) end
Tensor.clamp = lt.clamp

---@class luatrain.conv2d.Options
---@field stride? integer|integer[] default: 1
---@field pad? integer|integer[] default: 0
---@field dilation? integer|integer[] default: 1
---@field groups? integer|integer[] default: 1

---`conv2d(x, w, b?; stride=1, pad=0, dilation=1, groups=1)`
---
---Cross-correlation of x (n, h, w, in), padded with zeros, with w (out, kh, kw, in/groups), plus b (out); the result has shape (n, oh, ow, out).
---@param x luatrain.Tensor|number
---@param w luatrain.Tensor|number
---@param b? luatrain.Tensor|luatrain.conv2d.Options
---@param stride? integer|integer[]|luatrain.conv2d.Options
---@param pad? integer|integer[]
---@param dilation? integer|integer[]
---@param groups? integer|integer[]
---@return luatrain.Tensor
function lt.conv2d(x, w, b, stride, pad, dilation, groups) end
Tensor.conv2d = lt.conv2d

---@class luatrain.cross_entropy.Options
---@field label_smoothing? number default: 0.0

---`cross_entropy(x, labels; label_smoothing=0.0)`
---
---Mean over rows of x (..., classes) of -sum(q log softmax(x)), with q = (1 - label_smoothing) onehot(labels) + label_smoothing / classes and labels (...) counted from 0; 0 if there are no rows.
---@param x luatrain.Tensor|number
---@param labels luatrain.Tensor|number
---@param label_smoothing? number|luatrain.cross_entropy.Options
---@return luatrain.Tensor
function lt.cross_entropy(x, labels, label_smoothing) end
Tensor.cross_entropy = lt.cross_entropy

---@class luatrain.data
lt.data = {}

---Reads a JPEG or PNG file. Returns a u8 tensor (h, w, channels). channels: 1 or 3, the default.
---@param path string
---@param channels? 1|3
---@return luatrain.Tensor
function lt.data.image(path, channels) end

---`data.open{size?}`
---
---lt.data.open(what[, {size = 224}]): opens the data set named `what`, in one of the forms above.
---Returns the training set and the test set. Images of images:DIR are resized to size x size.
---@param what string
---@param given? luatrain.data.open.Options
---@return luatrain.Set
---@return luatrain.Set
function lt.data.open(what, given) end

---`data.set{images, labels; classes?, names?, mean?, std?}`
---
---A set of your own. images: (n, h, w, c) or (n, h, w), u8 or a float dtype; labels: (n), of an
---integer dtype. Both are kept. u8 pixels are divided by 255, floats are used as they are; both are
---then normalised by mean and std, each one number or a list of a number per channel.
---@param given luatrain.data.set.Options
---@return luatrain.Set
function lt.data.set(given) end

---`div(x, y)`
---
---x / y; x and y broadcast, integers truncate toward zero, and an integer / 0 is 0.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.div(x, y) end
Tensor.div = lt.div

---@class luatrain.dropout.Options
---@field p? number default: 0.5
---@field train? boolean default: true

---`dropout(x; p=0.5, train=true)`
---
---y = x / (1 - p) with probability 1 - p, else 0, independently for each element; with train=false, y = x.
---@param x luatrain.Tensor|number
---@param p? number|luatrain.dropout.Options
---@param train? boolean
---@return luatrain.Tensor
function lt.dropout(x, p, train) end
Tensor.dropout = lt.dropout

---`embedding(w, ids)`
---
---y[i] = w[ids[i]]: rows of w (rows, ...), selected by integer ids of any shape, which count from 0; y has the shape of ids, then that of a row.
---@param w luatrain.Tensor|number
---@param ids luatrain.Tensor|number
---@return luatrain.Tensor
function lt.embedding(w, ids) end
Tensor.embedding = lt.embedding

---`eq(x, y)`
---
---1 where x = y, else 0, as u8; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.eq(x, y) end
Tensor.eq = lt.eq

---`exp(x)`
---
---y = e^x for each element of x.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.exp(x) end
Tensor.exp = lt.exp

---`lt.fit{net, train, test, optim, epochs, batch; loss?, label_smoothing=0.0, metrics?, schedule?, augment?, mixup=0.0, sizes?, target?, accumulate=1, eval_batch?, workers?, out?, resume?, save_every?, max_steps?, amp?, scaler?}`
---
---Trains net and returns the last report: {top1 = , loss = , train_loss = }. accumulate = k splits
---each batch into k micro-batches, which saves memory and gives the same step. mixup, sizes, target
---and scaler are as in lt.run, metrics as in run:evaluate.
---@param given luatrain.fit.Options
---@return luatrain.Report
function lt.fit(given) end

---Every element is value.
---@param shape integer[]
---@param value number
---@param options? luatrain.Maker
---@return luatrain.Tensor
function lt.full(shape, value, options) end

---`ge(x, y)`
---
---1 where x >= y, else 0, as u8; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.ge(x, y) end
Tensor.ge = lt.ge

---`gelu(x)`
---
---y = x (1 + erf(x / sqrt(2))) / 2 for each element of x (exact, not the tanh form).
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.gelu(x) end
Tensor.gelu = lt.gelu

---`global_avg_pool2d(x)`
---
---Mean over the pixels of each image: x (n, h, w, c) to (n, c).
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.global_avg_pool2d(x) end
Tensor.global_avg_pool2d = lt.global_avg_pool2d

---`lt.grad_check(f, inputs, {eps=1e-5, tol=1e-6})`
---
---Returns true, or raises an error that names the first element with a wrong gradient. Checks the
---float tensors among inputs; f gets copies of them in float64 on the CPU.
---@param f fun(...: luatrain.Tensor): luatrain.Tensor
---@param inputs luatrain.Tensor[]
---@param options? luatrain.grad_check.Options
---@return boolean
function lt.grad_check(f, inputs, options) end

---`gt(x, y)`
---
---1 where x > y, else 0, as u8; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.gt(x, y) end
Tensor.gt = lt.gt

---lt.help "conv2d": the op's signature and description
---@param name string
---@return string
function lt.help(name) end

---@class luatrain.layer_norm.Options
---@field eps? number default: 1e-5

---`layer_norm(x, scale, shift; eps=1e-5)`
---
---y = (x - mean) / sqrt(var + eps) * scale + shift for x (..., n), scale (n) and shift (n), with mean and biased var over the last axis.
---@param x luatrain.Tensor|number
---@param scale luatrain.Tensor|number
---@param shift luatrain.Tensor|number
---@param eps? number|luatrain.layer_norm.Options
---@return luatrain.Tensor
function lt.layer_norm(x, scale, shift, eps) end
Tensor.layer_norm = lt.layer_norm

---`le(x, y)`
---
---1 where x <= y, else 0, as u8; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.le(x, y) end
Tensor.le = lt.le

---`linear(x, w, b?)`
---
---y = x w^T + b for x (..., in), w (out, in) and b (out); y has shape (..., out).
---@param x luatrain.Tensor|number
---@param w luatrain.Tensor|number
---@param b? luatrain.Tensor
---@return luatrain.Tensor
function lt.linear(x, w, b) end
Tensor.linear = lt.linear

---lt.load(path): returns the tensors of a safetensors file by name, and its metadata as a table of
---strings. EFILE if the file has a digest, as files of lt.save have, and does not match it.
---@param path string
---@return table<string, luatrain.Tensor>
---@return table<string, string>
function lt.load(path) end

---`log(x)`
---
---y = ln(x) for each element of x.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.log(x) end
Tensor.log = lt.log

---@class luatrain.log_softmax.Options
---@field axis? integer|integer[] default: -1

---`log_softmax(x; axis=-1)`
---
---y = x - log(sum(exp(x))) along an axis of x; y has the shape of x.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.log_softmax.Options
---@return luatrain.Tensor
function lt.log_softmax(x, axis) end
Tensor.log_softmax = lt.log_softmax

---`lt(x, y)`
---
---1 where x < y, else 0, as u8; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.lt(x, y) end
Tensor.lt = lt.lt

---`matmul(x, y)`
---
---Matrix product of x (..., m, k) and y (..., k, n), of shape (..., m, n); the leading axes broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.matmul(x, y) end
Tensor.matmul = lt.matmul

---@class luatrain.max.Options
---@field axis? integer|integer[] may be absent
---@field keep? boolean default: false

---`max(x; axis?, keep=false)`
---
---Largest element of x over one axis, several or all (the default); nan if any is nan, and equal elements share the gradient evenly.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.max.Options
---@param keep? boolean
---@return luatrain.Tensor
function lt.max(x, axis, keep) end
Tensor.max = lt.max

---@class luatrain.max_pool2d.Options
---@field kernel? integer|integer[] required
---@field stride? integer|integer[] default: kernel
---@field pad? integer|integer[] default: 0

---`max_pool2d(x; kernel, stride=kernel, pad=0)`
---
---Maximum over windows of x (n, h, w, c), to (n, oh, ow, c); padding counts as -inf, and the gradient goes to the first maximum of a window.
---@param x luatrain.Tensor|number
---@param kernel? integer|integer[]|luatrain.max_pool2d.Options
---@param stride? integer|integer[]
---@param pad? integer|integer[]
---@return luatrain.Tensor
function lt.max_pool2d(x, kernel, stride, pad) end
Tensor.max_pool2d = lt.max_pool2d

---@class luatrain.mean.Options
---@field axis? integer|integer[] may be absent
---@field keep? boolean default: false

---`mean(x; axis?, keep=false)`
---
---Mean of x over one axis, several or all (the default); keep=true keeps them with size 1, and integers give f32.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.mean.Options
---@param keep? boolean
---@return luatrain.Tensor
function lt.mean(x, axis, keep) end
Tensor.mean = lt.mean

---The bytes of tensors: {live, peak, cached, device = {...}}.
---@return table
function lt.memory() end

---@class luatrain.metrics
lt.metrics = {}

---Checks a list of metrics, for `who`, and returns it. nil means {metrics.top1}.
---@param list? luatrain.metric.Options[]
---@param who string
---@return luatrain.metric.Options[]
function lt.metrics.read(list, who) end

---lt.metrics.top(k): the fraction of samples with fewer than k logits above that of the label.
---logits: (n, classes); y: (n) of i64. NaN is above all numbers; a label with a NaN logit is wrong.
---top(1) is exact for ties: as in argmax, the first of the largest logits is the prediction.
---@param k integer
---@return luatrain.metric.Options
function lt.metrics.top(k) end

---@type luatrain.metric.Options
lt.metrics.top1 = {}

---@type luatrain.metric.Options
lt.metrics.top5 = {}

---for x_i, y_i, share in lt.micro_batches(k, x, y) do ... end: splits a batch into k micro-batches,
---or fewer, so that none is empty. share is the micro-batch's fraction of the samples: the sum of
---loss * share over the micro-batches is the loss of the whole batch, and so are the gradients.
---Random ops in the net draw the same numbers as in one pass over the whole batch. All shards of a
---batch are split into the same number of micro-batches, because in some nets, as with
---nn.sync_batch_norm, ranks wait for each other in each pass.
---@param k integer
---@param x luatrain.Tensor
---@param y luatrain.Tensor
---@return fun(): luatrain.Tensor, luatrain.Tensor, number
function lt.micro_batches(k, x, y) end

---@class luatrain.min.Options
---@field axis? integer|integer[] may be absent
---@field keep? boolean default: false

---`min(x; axis?, keep=false)`
---
---Smallest element of x over one axis, several or all (the default); nan if any is nan, and equal elements share the gradient evenly.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.min.Options
---@param keep? boolean
---@return luatrain.Tensor
function lt.min(x, axis, keep) end
Tensor.min = lt.min

---Returns the mixed images, (n, ...) as x; for each image, the label of the image mixed into it,
---(n); and the weight of the original image, from 0 to 1.
---@param x luatrain.Tensor
---@param y luatrain.Tensor
---@param alpha number
---@return luatrain.Tensor
---@return luatrain.Tensor
---@return number
function lt.mixup(x, y, alpha) end

---@class luatrain.models
lt.models = {}

---`lenet{classes=10, channels=1, size=28}`
---
---@param options? luatrain.lenet.Options
---@return luatrain.Module
function lt.models.lenet(options) end

---`mlp{classes=10, channels=1, size=28, hidden=256}`
---
---@param options? luatrain.mlp.Options
---@return luatrain.Module
function lt.models.mlp(options) end

---`mobilenet_v1{classes=1000, channels=3, width=1.0, stride=2, sync_bn=false}`
---
---@param options? luatrain.mobilenet_v1.Options
---@return luatrain.Module
function lt.models.mobilenet_v1(options) end

---`resnet101{classes=1000, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet101.Options
---@return luatrain.Module
function lt.models.resnet101(options) end

---`resnet152{classes=1000, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet152.Options
---@return luatrain.Module
function lt.models.resnet152(options) end

---`resnet18{classes=1000, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet18.Options
---@return luatrain.Module
function lt.models.resnet18(options) end

---`resnet20{classes=10, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet20.Options
---@return luatrain.Module
function lt.models.resnet20(options) end

---`resnet32{classes=10, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet32.Options
---@return luatrain.Module
function lt.models.resnet32(options) end

---`resnet34{classes=1000, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet34.Options
---@return luatrain.Module
function lt.models.resnet34(options) end

---`resnet44{classes=10, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet44.Options
---@return luatrain.Module
function lt.models.resnet44(options) end

---`resnet50{classes=1000, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet50.Options
---@return luatrain.Module
function lt.models.resnet50(options) end

---`resnet56{classes=10, channels=3, zero_init=false, sync_bn=false}`
---
---@param options? luatrain.resnet56.Options
---@return luatrain.Module
function lt.models.resnet56(options) end

---`vgg11{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5}`
---
---@param options? luatrain.vgg11.Options
---@return luatrain.Module
function lt.models.vgg11(options) end

---`vgg11_bn{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5, sync_bn=false}`
---
---@param options? luatrain.vgg11_bn.Options
---@return luatrain.Module
function lt.models.vgg11_bn(options) end

---`vgg13{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5}`
---
---@param options? luatrain.vgg13.Options
---@return luatrain.Module
function lt.models.vgg13(options) end

---`vgg13_bn{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5, sync_bn=false}`
---
---@param options? luatrain.vgg13_bn.Options
---@return luatrain.Module
function lt.models.vgg13_bn(options) end

---`vgg16{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5}`
---
---@param options? luatrain.vgg16.Options
---@return luatrain.Module
function lt.models.vgg16(options) end

---`vgg16_bn{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5, sync_bn=false}`
---
---@param options? luatrain.vgg16_bn.Options
---@return luatrain.Module
function lt.models.vgg16_bn(options) end

---`vgg19{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5}`
---
---@param options? luatrain.vgg19.Options
---@return luatrain.Module
function lt.models.vgg19(options) end

---`vgg19_bn{classes=1000, channels=3, size=224, hidden=4096, dropout=0.5, sync_bn=false}`
---
---@param options? luatrain.vgg19_bn.Options
---@return luatrain.Module
function lt.models.vgg19_bn(options) end

---`mse_loss(x, y)`
---
---Mean of (x - y)^2 over all elements of x and y, which have the same shape; 0 if they are empty.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.mse_loss(x, y) end
Tensor.mse_loss = lt.mse_loss

---`mul(x, y)`
---
---x * y; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.mul(x, y) end
Tensor.mul = lt.mul

---`ne(x, y)`
---
---1 where x != y (true if either is nan), else 0, as u8; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.ne(x, y) end
Tensor.ne = lt.ne

---`neg(x)`
---
---y = -x for each element of x; the smallest integer is unchanged.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.neg(x) end
Tensor.neg = lt.neg

---@class luatrain.nn
lt.nn = {}

---`nn.avg_pool2d{kernel; stride=kernel, pad=0}`
---
---@param given luatrain.nn.avg_pool2d.Options
---@return luatrain.Module
function lt.nn.avg_pool2d(given) end

---`nn.batch_norm{channels; momentum=0.1, eps=1e-5, scale=1.0, act=none}`
---
---@param given luatrain.nn.batch_norm.Options
---@return luatrain.Module
function lt.nn.batch_norm(given) end

---A field that is saved but not trained, with the same options.
---@param shape integer[]
---@param init? luatrain.nn.parameter.Options
---@return luatrain.Tensor
function lt.nn.buffer(shape, init) end

---`nn.conv2d{in, out, kernel; stride=1, pad=0, dilation=1, groups=1, bias=true, init=uniform}`
---
---Maps x (n, h, w, in) to (n, h', w', out). Weights w: (out, kh, kw, in / groups); bias b: (out).
---kernel, stride, pad (on each side) and dilation: a number, or {height, width}.
---@param given luatrain.nn.conv2d.Options
---@return luatrain.Module
function lt.nn.conv2d(given) end

---`nn.dropout{p=0.5}`
---
---In training mode, sets each element to 0 with probability p and divides the others by 1 - p.
---@param given? luatrain.nn.dropout.Options
---@return luatrain.Module
function lt.nn.dropout(given) end

---`nn.embedding{rows, dim}`
---
---Maps ids, integers counted from 0, of any shape (...) to rows of w: (..., dim). w: (rows, dim).
---@param given luatrain.nn.embedding.Options
---@return luatrain.Module
function lt.nn.embedding(given) end

---`nn.flatten{}`
---
---Reshapes (n, h, w, c) to (n, h w c).
---@param given? luatrain.nn.flatten.Options
---@return luatrain.Module
function lt.nn.flatten(given) end

---`nn.gelu{}`
---
---@param given? luatrain.nn.gelu.Options
---@return luatrain.Module
function lt.nn.gelu(given) end

---`nn.global_avg_pool2d{}`
---
---@param given? luatrain.nn.global_avg_pool2d.Options
---@return luatrain.Module
function lt.nn.global_avg_pool2d(given) end

---`nn.layer_norm{n; eps=1e-5}`
---
---Normalises over the last axis of x (..., n). eps is added to the variance.
---@param given luatrain.nn.layer_norm.Options
---@return luatrain.Module
function lt.nn.layer_norm(given) end

---`nn.linear{in, out; bias=true, init=uniform}`
---
---Maps x (..., in) to x w^T + b (..., out). Weights w: (out, in); bias b: (out).
---@param given luatrain.nn.linear.Options
---@return luatrain.Module
function lt.nn.linear(given) end

---`nn.max_pool2d{kernel; stride=kernel, pad=0}`
---
---@param given luatrain.nn.max_pool2d.Options
---@return luatrain.Module
function lt.nn.max_pool2d(given) end

---nn.module(fields, forward[, text]): a custom module. forward(self, ...) computes its result from
---the fields; tostring shows text. Takes the table of fields.
---@param fields table
---@param forward fun(self: luatrain.Module, ...: any): any ...
---@param text? string
---@return luatrain.Module
function lt.nn.module(fields, forward, text) end

---`nn.parameter(shape, {value=0.0, low?, high?, mean?, deviation?})`
---
---A learnable field. init is {value = 0}, a constant; {low = -0.1, high = 0.1}, uniform; or
---{mean = 0, deviation = 1}, normal.
---@param shape integer[]
---@param init? luatrain.nn.parameter.Options
---@return luatrain.Tensor
function lt.nn.parameter(shape, init) end

---`nn.relu{}`
---
---@param given? luatrain.nn.relu.Options
---@return luatrain.Module
function lt.nn.relu(given) end

---`nn.relu6{}`
---
---@param given? luatrain.nn.relu6.Options
---@return luatrain.Module
function lt.nn.relu6(given) end

---`nn.residual{body; skip?}`
---
---body(x) + x, or body(x) + skip(x).
---@param given luatrain.nn.residual.Options
---@return luatrain.Module
function lt.nn.residual(given) end

---Runs layers in sequence: modules and functions by number, or modules by name. Named layers run in
---the order in which they were made; in a table constructor, that is the order of the text. The
---string field `name` is the name of the root in messages.
---@param layers table
---@return luatrain.Module
function lt.nn.sequential(layers) end

---`nn.sigmoid{}`
---
---@param given? luatrain.nn.sigmoid.Options
---@return luatrain.Module
function lt.nn.sigmoid(given) end

---`nn.sync_batch_norm{channels; momentum=0.1, eps=1e-5, scale=1.0, act=none}`
---
---@param given luatrain.nn.sync_batch_norm.Options
---@return luatrain.Module
function lt.nn.sync_batch_norm(given) end

---`nn.tanh{}`
---
---@param given? luatrain.nn.tanh.Options
---@return luatrain.Module
function lt.nn.tanh(given) end

---lt.no_grad(fn, ...): calls fn without recording the tape
---@param fn function
---@param ... any
---@return any ...
function lt.no_grad(fn, ...) end

---@class luatrain.norm.Options
---@field axis? integer|integer[] may be absent
---@field keep? boolean default: false

---`norm(x; axis?, keep=false)`
---
---Square root of the sum of x^2 over one axis, several or all (the default); the gradient at 0 is 0.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.norm.Options
---@param keep? boolean
---@return luatrain.Tensor
function lt.norm(x, axis, keep) end
Tensor.norm = lt.norm

---lt.on_root(fn, ...): on rank 0, calls fn(...) and returns its results; on other ranks, does
---nothing. In fn, collective operations such as a step or an evaluation raise an error.
---@param fn function
---@param ... any
---@return any ...
function lt.on_root(fn, ...) end

---Every element is 1.
---@param shape integer[]
---@param options? luatrain.Maker
---@return luatrain.Tensor
function lt.ones(shape, options) end

---@class luatrain.optim
lt.optim = {}

---`optim.adam(net, {lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decay_bias=true, clip=0.0, lr_factor=1.0})`
---
---@param what luatrain.Parameters
---@param options luatrain.optim.adam.Options
---@return luatrain.Optim
function lt.optim.adam(what, options) end

---`optim.adamw(net, {lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decay_bias=true, clip=0.0, lr_factor=1.0})`
---
---@param what luatrain.Parameters
---@param options luatrain.optim.adamw.Options
---@return luatrain.Optim
function lt.optim.adamw(what, options) end

---`optim.lars(net, {lr, momentum=0.9, weight_decay=0.0, trust=0.001, eps=1e-8, decay_bias=false, clip=0.0, lr_factor=1.0})`
---
---LARS, for large batches (You, Gitman and Ginsburg 2017, arXiv:1708.03888). Each parameter's step
---is proportional to the parameter's norm:
---  v = momentum v + q (g + weight_decay w);  w = w - lr v
---  q = trust |w| / (|g| + weight_decay |w| + eps), or 1 for parameters of at most one axis
---The paper multiplies by lr inside v. Here a new lr takes full effect at once, as with sgd; while
---lr is constant, both are the same.
---@param what luatrain.Parameters
---@param options luatrain.optim.lars.Options
---@return luatrain.Optim
function lt.optim.lars(what, options) end

---`optim.sgd(net, {lr, momentum=0.0, nesterov=false, weight_decay=0.0, decay_bias=true, clip=0.0, lr_factor=1.0})`
---
---v = momentum v + g + weight_decay w;  w = w - lr v
---With nesterov: w = w - lr (g + weight_decay w + momentum v)
---@param what luatrain.Parameters
---@param options luatrain.optim.sgd.Options
---@return luatrain.Optim
function lt.optim.sgd(what, options) end

---@class luatrain.pad.Options
---@field before? integer|integer[] required
---@field after? integer|integer[] required
---@field value? number default: 0.0

---`pad(x; before, after, value=0.0)`
---
---x with `before` and `after` elements of one value added at the ends of each axis; each is one count, or one per axis.
---@param x luatrain.Tensor|number
---@param before? integer|integer[]|luatrain.pad.Options
---@param after? integer|integer[]
---@param value? number
---@return luatrain.Tensor
function lt.pad(x, before, after, value) end
Tensor.pad = lt.pad

---@class luatrain.permute.Options
---@field axes? integer|integer[] required

---`permute(x; axes)`
---
---x with axis axes[i] as its axis i; the result is a copy.
---@param x luatrain.Tensor|number
---@param axes? integer|integer[]|luatrain.permute.Options
---@return luatrain.Tensor
function lt.permute(x, axes) end
Tensor.permute = lt.permute

---`pow(x, y)`
---
---x^y; x and y broadcast, and an integer to a negative power truncates toward zero.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.pow(x, y) end
Tensor.pow = lt.pow

---Uniform from 0 to 1.
---@param shape integer[]
---@param options? luatrain.Maker
---@return luatrain.Tensor
function lt.rand(shape, options) end

---Normal with mean 0 and deviation 1.
---@param shape integer[]
---@param options? luatrain.Maker
---@return luatrain.Tensor
function lt.randn(shape, options) end

---lt.rank(): this rank, from 0, and the number of ranks
---@return integer
---@return integer
function lt.rank() end

---`relu(x)`
---
---y = max(x, 0) for each element of x.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.relu(x) end
Tensor.relu = lt.relu

---`relu6(x)`
---
---y = min(max(x, 0), 6) for each element.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.relu6(x) end
Tensor.relu6 = lt.relu6

---@class luatrain.reshape.Options
---@field shape? integer|integer[] required

---`reshape(x; shape)`
---
---The elements of x in another shape, in which one axis may be -1 to be inferred; the result is a view.
---@param x luatrain.Tensor|number
---@param shape? integer|integer[]|luatrain.reshape.Options
---@return luatrain.Tensor
function lt.reshape(x, shape) end
Tensor.reshape = lt.reshape

---`lt.run{net, optim, train, epochs, batch; schedule?, augment?, mixup=0.0, sizes?, target?, workers?, out?, resume?, save_every?, max_steps?, amp?, scaler?}`
---
---lt.run: see the top of the file.
---@param given luatrain.run.Options
---@return luatrain.Run
function lt.run(given) end

---lt.save(path, what[, meta]): writes a net or a table of tensors by name as a safetensors file.
---meta is a table of strings, numbers and booleans by name; lt.load returns them as strings.
---@param path string
---@param what luatrain.Module|table<string, luatrain.Tensor>
---@param meta? table<string, string|number|boolean>
function lt.save(path, what, meta) end

---@class luatrain.schedule
lt.schedule = {}

---`schedule.constant{warmup=0.0, ramp=linear, start=0.0}`
---
---@param given? luatrain.schedule.constant.Options
---@return luatrain.Schedule
function lt.schedule.constant(given) end

---`schedule.cosine{final=0.0, warmup=0.0, ramp=linear, start=0.0}`
---
---@param given? luatrain.schedule.cosine.Options
---@return luatrain.Schedule
function lt.schedule.cosine(given) end

---`schedule.cosine_linear{mix=0.5, final=0.0, warmup=0.0, ramp=linear, start=0.0}`
---
---@param given? luatrain.schedule.cosine_linear.Options
---@return luatrain.Schedule
function lt.schedule.cosine_linear(given) end

---`schedule.linear{final=0.0, warmup=0.0, ramp=linear, start=0.0}`
---
---@param given? luatrain.schedule.linear.Options
---@return luatrain.Schedule
function lt.schedule.linear(given) end

---`schedule.lr_for_batch{base, batch; per=256}`
---
---The learning rate for batches of `batch` samples, in proportion to `base`, the rate for batches
---of `per` samples (linear scaling, Goyal et al.). The rate may change at any step without momentum
---correction, because the momentum of optim.sgd and optim.lars sums gradients, not steps.
---@param given luatrain.schedule.lr_for_batch.Options
---@return number
function lt.schedule.lr_for_batch(given) end

---`schedule.polynomial{power=2.0, final=0.0, warmup=0.0, ramp=linear, start=0.0}`
---
---@param given? luatrain.schedule.polynomial.Options
---@return luatrain.Schedule
function lt.schedule.polynomial(given) end

---`schedule.step{at; factor=0.1, warmup=0.0, ramp=linear, start=0.0}`
---
---Multiplies the rate by `factor` at each epoch in the list `at`: schedule.step{at = {30, 60, 80}}.
---@param given luatrain.schedule.step.Options
---@return luatrain.Schedule
function lt.schedule.step(given) end

---Sets the seed, if n is given, and returns it.
---@param n? integer
---@return integer
function lt.seed(n) end

---`sigmoid(x)`
---
---y = 1 / (1 + exp(-x)) for each element of x.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.sigmoid(x) end
Tensor.sigmoid = lt.sigmoid

---@class luatrain.slice.Options
---@field axis? integer|integer[] required
---@field first? integer|integer[] required
---@field last? integer|integer[] required

---`slice(x; axis, first, last)`
---
---The part of x from position first to last, both included, along an axis; the result is a view if it is the first axis.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.slice.Options
---@param first? integer|integer[]
---@param last? integer|integer[]
---@return luatrain.Tensor
function lt.slice(x, axis, first, last) end
Tensor.slice = lt.slice

---@class luatrain.softmax.Options
---@field axis? integer|integer[] default: -1

---`softmax(x; axis=-1)`
---
---y = exp(x) / sum(exp(x)) along an axis of x; y has the shape of x.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.softmax.Options
---@return luatrain.Tensor
function lt.softmax(x, axis) end
Tensor.softmax = lt.softmax

---`sqrt(x)`
---
---y = sqrt(x) for each element of x.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.sqrt(x) end
Tensor.sqrt = lt.sqrt

---lt.step(fn, ...): calls fn, frees its temporaries
---@param fn function
---@param ... any
---@return any ...
function lt.step(fn, ...) end

---The number of optimizer steps that were taken.
---@return integer
function lt.steps() end

---`sub(x, y)`
---
---x - y; x and y broadcast.
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.sub(x, y) end
Tensor.sub = lt.sub

---@class luatrain.sum.Options
---@field axis? integer|integer[] may be absent
---@field keep? boolean default: false

---`sum(x; axis?, keep=false)`
---
---Sum of x over one axis, several or all (the default); keep=true keeps them with size 1, and integers give i64.
---@param x luatrain.Tensor|number
---@param axis? integer|integer[]|luatrain.sum.Options
---@param keep? boolean
---@return luatrain.Tensor
function lt.sum(x, axis, keep) end
Tensor.sum = lt.sum

---@class luatrain.summary
---@overload fun(net: luatrain.Module, shape: integer[]): string
lt.summary = {}

---Prepares `luatrain summary script.lua`: the script's first run will show its net and end the
---script. Returns the index of the script among the arguments, and a function to call after it.
---@param script string
function lt.summary.attach(script) end

---`tanh(x)`
---
---y = tanh(x) for each element of x.
---@param x luatrain.Tensor|number
---@return luatrain.Tensor
function lt.tanh(x) end
Tensor.tanh = lt.tanh

---From nested lists of numbers.
---@param value number|table
---@param options? luatrain.Maker
---@return luatrain.Tensor
function lt.tensor(value, options) end

---@class luatrain.transpose.Options
---@field axes? integer|integer[] may be absent

---`transpose(x; axes?)`
---
---x with two axes swapped, by default the last two; the result is a copy.
---@param x luatrain.Tensor|number
---@param axes? integer|integer[]|luatrain.transpose.Options
---@return luatrain.Tensor
function lt.transpose(x, axes) end
Tensor.transpose = lt.transpose

---@type string
lt.version = ""

---`where(cond, x, y)`
---
---x where cond (u8) is not 0, else y; cond, x and y broadcast.
---@param cond luatrain.Tensor|number
---@param x luatrain.Tensor|number
---@param y luatrain.Tensor|number
---@return luatrain.Tensor
function lt.where(cond, x, y) end
Tensor.where = lt.where

---Every element is 0.
---@param shape integer[]
---@param options? luatrain.Maker
---@return luatrain.Tensor
function lt.zeros(shape, options) end

---@class luatrain.amp.scaler.Options
---@field policy? 'adaptive'|'dynamic'|'static' default: adaptive
---@field scale? number a non-negative number; default: 65536.0
---@field growth_interval? integer a non-negative integer; default: 2000

---@class luatrain.augment.Options
---@field crop? integer a non-negative integer; default: 0
---@field flip? boolean true or false; default: false
---@field area? number a number; default: 1.0

---@class luatrain.batches.Options
---@field [1]? integer batch
---@field batch? integer a positive integer
---@field shuffle? boolean true or false; default: false
---@field epoch? integer a non-negative integer; default: 1
---@field first? integer a non-negative integer; default: 0
---@field dtype? luatrain.DType a string; default: f32
---@field crop? integer a non-negative integer; default: 0
---@field flip? boolean true or false; default: false
---@field area? number a number; default: 1.0
---@field workers? integer a non-negative integer
---@field shard? boolean true or false; default: false
---@field grain? integer a positive integer; default: 1

---@class luatrain.data.open.Options
---@field size? integer a positive integer

---@class luatrain.data.set.Options
---@field [1]? luatrain.Tensor images
---@field images? luatrain.Tensor a tensor
---@field [2]? luatrain.Tensor labels
---@field labels? luatrain.Tensor a tensor
---@field classes? integer a positive integer
---@field names? string[] a list of strings
---@field mean? number|number[] a number or a list of numbers
---@field std? number|number[] a number or a list of numbers

---@class luatrain.lenet.Options
---@field classes? integer a positive integer; default: 10
---@field channels? integer a positive integer; default: 1
---@field size? integer a positive integer; default: 28

---@class luatrain.fit.Options
---@field net luatrain.Module a net
---@field train luatrain.Set a set of lt.data
---@field test luatrain.Set a set of lt.data
---@field optim luatrain.Optim an optimizer of lt.optim
---@field epochs integer a positive integer
---@field batch integer a positive integer
---@field loss? fun(logits: luatrain.Tensor, y: luatrain.Tensor): luatrain.Tensor a function
---@field label_smoothing? number a number; default: 0.0
---@field metrics? luatrain.metric.Options[] a list of tables
---@field schedule? luatrain.Schedule a function
---@field augment? luatrain.augment.Options|false a table of options, or false
---@field mixup? number a non-negative number; default: 0.0
---@field sizes? luatrain.sizes.Options[] a list of tables
---@field target? number a number from 0 to 1
---@field accumulate? integer a non-negative integer; default: 1
---@field eval_batch? integer a positive integer
---@field workers? integer a non-negative integer
---@field out? string a path
---@field resume? string a path
---@field save_every? integer a positive integer
---@field max_steps? integer a positive integer
---@field amp? 'off'|'bf16'|'fp16'|'auto' 
---@field scaler? luatrain.amp.scaler.Options|false a table of options, or false

---@class luatrain.grad_check.Options
---@field eps? number a number; default: 1e-5
---@field tol? number a number; default: 1e-6

---@class luatrain.run.Options
---@field net luatrain.Module a net
---@field optim luatrain.Optim an optimizer of lt.optim
---@field train luatrain.Set a set of lt.data
---@field epochs integer a positive integer
---@field batch integer a positive integer
---@field schedule? luatrain.Schedule a function
---@field augment? luatrain.augment.Options|false a table of options, or false
---@field mixup? number a non-negative number; default: 0.0
---@field sizes? luatrain.sizes.Options[] a list of tables
---@field target? number a number from 0 to 1
---@field workers? integer a non-negative integer
---@field out? string a path
---@field resume? string a path
---@field save_every? integer a positive integer
---@field max_steps? integer a positive integer
---@field amp? 'off'|'bf16'|'fp16'|'auto' 
---@field scaler? luatrain.amp.scaler.Options|false a table of options, or false

---@class luatrain.metric.Options
---@field [1]? string name
---@field name? string a string
---@field [2]? fun(logits: luatrain.Tensor, y: luatrain.Tensor): luatrain.Tensor|number count
---@field count? fun(logits: luatrain.Tensor, y: luatrain.Tensor): luatrain.Tensor|number a function

---@class luatrain.mlp.Options
---@field classes? integer a positive integer; default: 10
---@field channels? integer a positive integer; default: 1
---@field size? integer a positive integer; default: 28
---@field hidden? integer a positive integer; default: 256

---@class luatrain.mobilenet_v1.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field width? number a non-negative number; default: 1.0
---@field stride? integer a positive integer; default: 2
---@field sync_bn? boolean true or false; default: false

---@class luatrain.nn.avg_pool2d.Options
---@field [1]? integer|integer[] kernel
---@field kernel? integer|integer[] a non-negative integer, or two (height, width)
---@field stride? integer|integer[] a non-negative integer, or two (height, width); default: kernel
---@field pad? integer|integer[] a non-negative integer, or two (height, width); default: 0

---@class luatrain.nn.batch_norm.Options
---@field [1]? integer channels
---@field channels? integer a positive integer
---@field momentum? number a number; default: 0.1
---@field eps? number a number; default: 1e-5
---@field scale? number a number; default: 1.0
---@field act? 'none'|'relu'|'relu6' default: none

---@class luatrain.nn.conv2d.Options
---@field [1]? integer in
---@field ["in"]? integer a positive integer
---@field [2]? integer out
---@field out? integer a positive integer
---@field [3]? integer|integer[] kernel
---@field kernel? integer|integer[] a non-negative integer, or two (height, width)
---@field stride? integer|integer[] a non-negative integer, or two (height, width); default: 1
---@field pad? integer|integer[] a non-negative integer, or two (height, width); default: 0
---@field dilation? integer|integer[] a non-negative integer, or two (height, width); default: 1
---@field groups? integer a positive integer; default: 1
---@field bias? boolean true or false; default: true
---@field init? 'uniform'|'he'|number 'uniform', 'he' or a standard deviation; default: uniform

---@class luatrain.nn.dropout.Options
---@field [1]? number p
---@field p? number a number; default: 0.5

---@class luatrain.nn.embedding.Options
---@field [1]? integer rows
---@field rows? integer a positive integer
---@field [2]? integer dim
---@field dim? integer a positive integer

---@class luatrain.nn.flatten.Options

---@class luatrain.nn.gelu.Options

---@class luatrain.nn.global_avg_pool2d.Options

---@class luatrain.nn.layer_norm.Options
---@field [1]? integer n
---@field n? integer a positive integer
---@field eps? number a number; default: 1e-5

---@class luatrain.nn.linear.Options
---@field [1]? integer in
---@field ["in"]? integer a positive integer
---@field [2]? integer out
---@field out? integer a positive integer
---@field bias? boolean true or false; default: true
---@field init? 'uniform'|'he'|number 'uniform', 'he' or a standard deviation; default: uniform

---@class luatrain.nn.max_pool2d.Options
---@field [1]? integer|integer[] kernel
---@field kernel? integer|integer[] a non-negative integer, or two (height, width)
---@field stride? integer|integer[] a non-negative integer, or two (height, width); default: kernel
---@field pad? integer|integer[] a non-negative integer, or two (height, width); default: 0

---@class luatrain.nn.parameter.Options
---@field value? number a number; default: 0.0
---@field low? number a number
---@field high? number a number
---@field mean? number a number
---@field deviation? number a number

---@class luatrain.nn.relu.Options

---@class luatrain.nn.relu6.Options

---@class luatrain.nn.residual.Options
---@field [1]? luatrain.Module|function body
---@field body? luatrain.Module|function a module or a function
---@field skip? luatrain.Module|function a module or a function

---@class luatrain.nn.sigmoid.Options

---@class luatrain.nn.sync_batch_norm.Options
---@field [1]? integer channels
---@field channels? integer a positive integer
---@field momentum? number a number; default: 0.1
---@field eps? number a number; default: 1e-5
---@field scale? number a number; default: 1.0
---@field act? 'none'|'relu'|'relu6' default: none

---@class luatrain.nn.tanh.Options

---@class luatrain.optim.adam.Options
---@field lr number a non-negative number
---@field beta1? number a number; default: 0.9
---@field beta2? number a number; default: 0.999
---@field eps? number a number; default: 1e-8
---@field weight_decay? number a number; default: 0.0
---@field decay_bias? boolean true or false; default: true
---@field clip? number a non-negative number; default: 0.0
---@field lr_factor? number a non-negative number; default: 1.0

---@class luatrain.optim.adamw.Options
---@field lr number a non-negative number
---@field beta1? number a number; default: 0.9
---@field beta2? number a number; default: 0.999
---@field eps? number a number; default: 1e-8
---@field weight_decay? number a number; default: 0.01
---@field decay_bias? boolean true or false; default: true
---@field clip? number a non-negative number; default: 0.0
---@field lr_factor? number a non-negative number; default: 1.0

---@class luatrain.optim.lars.Options
---@field lr number a non-negative number
---@field momentum? number a number; default: 0.9
---@field weight_decay? number a number; default: 0.0
---@field trust? number a number; default: 0.001
---@field eps? number a number; default: 1e-8
---@field decay_bias? boolean true or false; default: false
---@field clip? number a non-negative number; default: 0.0
---@field lr_factor? number a non-negative number; default: 1.0

---@class luatrain.optim.sgd.Options
---@field lr number a non-negative number
---@field momentum? number a number; default: 0.0
---@field nesterov? boolean true or false; default: false
---@field weight_decay? number a number; default: 0.0
---@field decay_bias? boolean true or false; default: true
---@field clip? number a non-negative number; default: 0.0
---@field lr_factor? number a non-negative number; default: 1.0

---@class luatrain.resnet101.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.resnet152.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.resnet18.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.resnet20.Options
---@field classes? integer a positive integer; default: 10
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.resnet32.Options
---@field classes? integer a positive integer; default: 10
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.resnet34.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.resnet44.Options
---@field classes? integer a positive integer; default: 10
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.resnet50.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.resnet56.Options
---@field classes? integer a positive integer; default: 10
---@field channels? integer a positive integer; default: 3
---@field zero_init? boolean true or false; default: false
---@field sync_bn? boolean true or false; default: false

---@class luatrain.schedule.constant.Options
---@field warmup? number a non-negative number; default: 0.0
---@field ramp? 'linear'|'cosine'|'exponential'|'constant' default: linear
---@field start? number a number from 0 to 1; default: 0.0

---@class luatrain.schedule.cosine.Options
---@field final? number a non-negative number; default: 0.0
---@field warmup? number a non-negative number; default: 0.0
---@field ramp? 'linear'|'cosine'|'exponential'|'constant' default: linear
---@field start? number a number from 0 to 1; default: 0.0

---@class luatrain.schedule.cosine_linear.Options
---@field mix? number a number from 0 to 1; default: 0.5
---@field final? number a non-negative number; default: 0.0
---@field warmup? number a non-negative number; default: 0.0
---@field ramp? 'linear'|'cosine'|'exponential'|'constant' default: linear
---@field start? number a number from 0 to 1; default: 0.0

---@class luatrain.schedule.linear.Options
---@field final? number a non-negative number; default: 0.0
---@field warmup? number a non-negative number; default: 0.0
---@field ramp? 'linear'|'cosine'|'exponential'|'constant' default: linear
---@field start? number a number from 0 to 1; default: 0.0

---@class luatrain.schedule.lr_for_batch.Options
---@field [1]? number base
---@field base? number a non-negative number
---@field [2]? integer batch
---@field batch? integer a positive integer
---@field per? integer a positive integer; default: 256

---@class luatrain.schedule.polynomial.Options
---@field power? number a non-negative number; default: 2.0
---@field final? number a non-negative number; default: 0.0
---@field warmup? number a non-negative number; default: 0.0
---@field ramp? 'linear'|'cosine'|'exponential'|'constant' default: linear
---@field start? number a number from 0 to 1; default: 0.0

---@class luatrain.schedule.step.Options
---@field [1]? number[] at
---@field at? number[] a list of increasing numbers, like {30, 60}
---@field factor? number a non-negative number; default: 0.1
---@field warmup? number a non-negative number; default: 0.0
---@field ramp? 'linear'|'cosine'|'exponential'|'constant' default: linear
---@field start? number a number from 0 to 1; default: 0.0

---@class luatrain.vgg11.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field size? integer a positive integer; default: 224
---@field hidden? integer a positive integer; default: 4096
---@field dropout? number a number; default: 0.5

---@class luatrain.vgg11_bn.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field size? integer a positive integer; default: 224
---@field hidden? integer a positive integer; default: 4096
---@field dropout? number a number; default: 0.5
---@field sync_bn? boolean true or false; default: false

---@class luatrain.vgg13.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field size? integer a positive integer; default: 224
---@field hidden? integer a positive integer; default: 4096
---@field dropout? number a number; default: 0.5

---@class luatrain.vgg13_bn.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field size? integer a positive integer; default: 224
---@field hidden? integer a positive integer; default: 4096
---@field dropout? number a number; default: 0.5
---@field sync_bn? boolean true or false; default: false

---@class luatrain.vgg16.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field size? integer a positive integer; default: 224
---@field hidden? integer a positive integer; default: 4096
---@field dropout? number a number; default: 0.5

---@class luatrain.vgg16_bn.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field size? integer a positive integer; default: 224
---@field hidden? integer a positive integer; default: 4096
---@field dropout? number a number; default: 0.5
---@field sync_bn? boolean true or false; default: false

---@class luatrain.vgg19.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field size? integer a positive integer; default: 224
---@field hidden? integer a positive integer; default: 4096
---@field dropout? number a number; default: 0.5

---@class luatrain.vgg19_bn.Options
---@field classes? integer a positive integer; default: 1000
---@field channels? integer a positive integer; default: 3
---@field size? integer a positive integer; default: 224
---@field hidden? integer a positive integer; default: 4096
---@field dropout? number a number; default: 0.5
---@field sync_bn? boolean true or false; default: false

---@class luatrain.sizes.Options
---@field size integer a positive integer
---@field epochs? integer a positive integer
---@field batch? integer a positive integer
---@field area? number a number from 0 to 1

return lt
