-- annotation_types.lua - the types of the public API that the library itself does not declare, for
-- annotations.lua. That script compares the names with the library's.
--
-- A capitalised name is a class of the library. @NAME is the table of options that the spec NAME
-- declares (see check.lua). @ alone stands for the spec with the name of the function.

local types = {}

types.aliases = {
  {"Precision", "'off'|'bf16'|'fp16'"},
  {"Schedule", "fun(epoch: number, epochs: number): number"},
  {"Report", "table<string, number>"},
  {"Parameters", "Module|Tensor[]|{params: Module|Tensor[], [string]: any}[]"},
  {"TensorOptions", "{dtype?: DType, device?: string}"},
}

-- The types of options, by kind; kinds that name words, such as "'linear' or 'cosine'", need none.
types.kinds = {
  count = "integer", integer = "integer", pair = "integer|integer[]", number = "number",
  amount = "number", share = "number", epochs = "number[]", init = "'uniform'|'he'|number",
  boolean = "boolean", string = "string", path = "string", layer = "Module|function",
  net = "Module", optims = "Optim|Optim[]", set = "Set", tensor = "Tensor",
  numbers = "number|number[]", names = "string[]",
  list = "table[]", call = "function", options = "table|false",
}
-- The types of options whose kind says too little, by name.
types.named = {
  augment = "@augment|false", scaler = "@amp.scaler|false", sizes = "@sizes[]",
  metrics = "@metric[]", loss = "fun(logits: Tensor, y: Tensor): Tensor", schedule = "Schedule",
  count = "fun(logits: Tensor, y: Tensor): Tensor|number", dtype = "DType",
}

-- The fields of classes, and how an object is called. x.grad, set.images and set.labels may be nil,
-- but scripts that read them usually know that they are not, so editors should not warn.
types.classes = {
  {name = "Tensor", "shape: integer[]", "dtype: DType", "device: string", "grad: Tensor",
   "on_tape: boolean"},
  {name = "Module", "training: boolean", "[string|integer]: any",
   call = "fun(...: any): Tensor, any ..."},
  {name = "Optim", "groups: table[]", "grad_norm?: number"},
  {name = "Set", "count: integer", "classes: integer", "names?: string[]", "height: integer",
   "width: integer", "channels: integer", "mean: number[]", "std: number[]",
   "center_crop?: number", "augment: @augment", "images: Tensor", "labels: Tensor"},
  {name = "Batches"},
  {name = "Run", "folder: string", "epoch: integer", "steps: integer",
   "stage: {size?: integer, batch: integer, area: number}", "result: Report"},
  {name = "Scaler", "scale: number", "last_scale: number", "headroom?: number", "steps: integer",
   "skipped: integer"},
  {name = "Spec", "name: string", "usage: string", call = "fun(given?: table): table, string"},
}

-- Values that are neither functions nor tables of functions, by name.
types.values = {version = "string", top1 = "@metric", top5 = "@metric", precisions = "string[]"}

-- Functions: "parameter: type; parameter?: type -> result; result -- description". A table of the
-- library stands for all its functions that are not listed. The default description is the comment
-- in the source. Functions written in C declare their signatures in lua/bind.
types.signatures = {
  ["lt.nn"] = "given: @ -> Module",
  ["lt.models"] = "options: @ -> Module",
  ["lt.optim"] = "what: Parameters; options: @ -> Optim",
  ["lt.schedule"] = "given: @ -> Schedule",

  ["lt.args"] = "defaults: table -> table<string, any>",
  ["lt.barrier"] = "",
  ["lt.fit"] = "given: @ -> Report",
  ["lt.grad_check"] = "f: fun(...: Tensor): Tensor; inputs: Tensor[]; options: @ -> boolean",
  ["lt.load"] = "path: string -> table<string, Tensor>; table<string, string>",
  ["lt.micro_batches"] = "k: integer; x: Tensor; y: Tensor -> fun(): Tensor, Tensor, number",
  ["lt.mixup"] = "x: Tensor; y: Tensor; alpha: number -> Tensor; Tensor; number",
  ["lt.on_root"] = "fn: function; ...: any -> any ...",
  ["lt.rank"] = "-> integer; integer",
  ["lt.run"] = "given: @ -> Run",
  ["lt.save"] = "path: string; what: Module|table<string, Tensor>; "
                .. "meta?: table<string, string|number|boolean>",
  ["lt.seed"] = "n?: integer -> integer -- Returns the seed. If n is given, first sets the seed to "
                .. "n and restarts all random numbers; --seed and LUATRAIN_SEED have precedence "
                .. "over n. The initial values of a net are drawn at its first use.",
  ["lt.summary"] = "net: Module; shape: integer[] -> string",
  ["lt.summary.attach"] = "script: string",

  ["lt.amp.check"] = "fn: function; ...: any -> table",
  ["lt.amp.scaler"] = "options: @ -> Scaler",
  ["lt.check"] = "text: string -> Spec",
  ["lt.check.described"] = "value: any -> string",
  ["lt.check.hint"] = "word: string; names: string[]; otherwise: any -> any",
  ["lt.check.number"] = "value: Tensor|number; who: string; what: string -> number",
  ["lt.check.shown"] = "value: any -> string",
  ["lt.check.strict"] = "functions: table; name: string; prefix?: string -> table",
  ["lt.data.image"] = "path: string; channels?: 1|3 -> Tensor",
  ["lt.data.open"] = "what: string; given: @ -> Set; Set",
  ["lt.data.set"] = "given: @ -> Set",
  ["lt.metrics.read"] = "list?: @metric[]; who: string -> @metric[]",
  ["lt.metrics.top"] = "k: integer -> @metric",
  ["lt.nn.buffer"] = "shape: integer[]; init: @nn.parameter -> Tensor",
  ["lt.nn.module"] = "fields: table; forward: fun(self: Module, ...: any): any ...; text?: string "
                     .. "-> Module",
  ["lt.nn.parameter"] = "shape: integer[]; init: @ -> Tensor",
  ["lt.nn.sequential"] = "layers: table -> Module",
  ["lt.schedule.lr_for_batch"] = "given: @ -> number",

  ["Module:count"] = "-> integer",
  ["Module:eval"] = "-> Module",
  ["Module:freeze"] = "on?: boolean -> Module",
  ["Module:load"] = "path: string -> Module",
  ["Module:named_buffers"] = "-> fun(): string, Tensor",
  ["Module:named_parameters"] = "-> fun(): string, Tensor",
  ["Module:parameters"] = "-> Tensor[]",
  ["Module:sha256"] = "-> string",
  ["Module:state"] = "-> string[]; Tensor[]",
  ["Module:to"] = "dtype: DType -> Module",
  ["Module:train"] = "-> Module",
  ["Module:zero_grad"] = "",

  ["Optim:class"] = "-> string",
  ["Optim:has"] = "tensor: Tensor -> boolean",
  ["Optim:load"] = "state: table<string, Tensor>; _?: any",
  ["Optim:set"] = "name: string; value: any",
  ["Optim:settings"] = "-> table<string, any>",
  ["Optim:state"] = "-> table<string, Tensor>",
  ["Optim:step"] = "-> 'applied'|'skipped'|'accumulating'|'pending'",
  ["Optim:zero_grad"] = "",

  ["Set:batches"] = "given: @batches -> fun(pass?: Batches): Tensor, Tensor; Batches?",
  ["Set:open_batches"] = "given: @batches -> Batches",
  ["Set:sized"] = "size?: integer; given?: {center_crop?: number} -> Set",
  ["Batches:close"] = "-- Frees the pass.",
  ["Batches:next"] = "-> Tensor; Tensor -- The next batch: images and labels; nil at the end.",
  ["Batches:request"] = "first: integer -- Requests the batch from this position, counted from 0.",
  ["Batches:stats"] = "-> table -- Seconds and counts of the loader.",

  ["Run:batches"] = "-> fun(): Tensor, Tensor",
  ["Run:epochs"] = "-> fun(): integer",
  ["Run:evaluate"] = "set: Set; given?: {batch?: integer, loss?: function, metrics?: @metric[]} "
                     .. "-> Report",
  ["Run:mixup"] = "x: Tensor; y: Tensor -> Tensor; Tensor; number",
  ["Run:report"] = "numbers?: Report -> Report",
  ["Run:save"] = "",
  ["Run:step"] = "fn: function; ...: any -> number|Tensor",

  ["Scaler:at"] = "number?: integer -> number; number?; integer",
  ["Scaler:begin"] = "-> Scaler",
  ["Scaler:close"] = "",
  ["Scaler:compare"] = "",
  ["Scaler:inside"] = "fn: function; ...: any -> any ...",
  ["Scaler:latest"] = "-> integer",
  ["Scaler:load"] = "state: table<string, number>",
  ["Scaler:load_with_changes"] = "state: table<string, number>; changed: table<string, boolean>",
  ["Scaler:settings"] = "-> table",
  ["Scaler:state"] = "-> table<string, number>",
  ["Spec:value"] = "name: string; value: any -> any",
}

return types
