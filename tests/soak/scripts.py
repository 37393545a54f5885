"""Draws small training scripts, each a few steps of a net of a few layers on synthetic images."""

HEAD = """local lt = require "luatrain"
local nn = lt.nn
local o = lt.args{acc = 1, signal = "", at = 0, rank = 0}
local train, test = lt.data.open "synthetic:8x8x2/3/%(n)d"

-- Sends a signal to this process in the call number --at of the loss function on rank --rank.
local calls = 0
local function trip()
  calls = calls + 1
  if calls == o.at and lt.rank() == o.rank then os.execute("kill -" .. o.signal .. " $PPID") end
end
"""

PLAIN = """
local net = nn.sequential{
  c1 = nn.conv2d{2, 4, 3, pad = 1}, %(n1)sa1 = nn.%(act)s(), pool = nn.%(pool)s{2},
  c2 = nn.conv2d{4, 8, 3, pad = 1, groups = %(conv_groups)d}, %(n2)sa2 = nn.%(act)s(),
  flat = nn.flatten(), d1 = nn.dropout{%(drop)g},
  f1 = nn.linear{128, 8}, a3 = nn.relu(), d2 = nn.dropout{%(drop)g}, f2 = nn.linear{8, 3}}
"""

# A residual block, and a longer connection across it.
SKIP = """
local function block(c)
  return nn.residual{nn.sequential{
    c1 = nn.conv2d{c, c, 3, pad = 1, bias = false}, %(n1)sr = nn.relu(),
    c2 = nn.conv2d{c, c, 3, pad = 1, bias = false}%(n2)s}}
end
local net = nn.module({
  c1 = nn.conv2d{2, 4, 3, pad = 1}, b1 = block(4), b2 = block(4), d1 = nn.dropout{%(drop)g},
  f2 = nn.linear{4, 3}},
  function(self, x)
    local a = lt.%(act)s(self.c1(x))
    return self.f2(self.d1(lt.global_avg_pool2d(lt.relu(self.b2(self.b1(a))) + a)))
  end)
"""

# One convolution twice.
TIED = """
local net = nn.module({
  c1 = nn.conv2d{2, 4, 3, pad = 1}, c2 = nn.conv2d{4, 4, 3, pad = 1}, d1 = nn.dropout{%(drop)g},
  flat = nn.flatten(), f1 = nn.linear{64, 8}, f2 = nn.linear{8, 3}},
  function(self, x)
    local a = self.c2(lt.%(act)s(self.c2(lt.relu(self.c1(x)))))
    local h = lt.relu(self.f1(self.flat(lt.%(pool)s(a, 2))))
    return self.f2(self.d1(h))
  end)
"""

FIT = """
lt.fit{net = net, optim = %(optims)s, train = train, test = test, epochs = %(epochs)d,
       batch = %(batch)d, accumulate = o.acc, eval_batch = 8, %(settings)s,
       loss = function(y, labels)
         trip()
         return lt.cross_entropy(y, labels, %(smooth)g)
       end}
"""

RUN = """
local run <close> = lt.run{net = net, optim = %(optims)s, train = train, epochs = %(epochs)d,
                           batch = %(batch)d, %(settings)s}
local function loss_of(x, y)
  trip()
  return lt.cross_entropy(net(x), y, %(smooth)g)%(penalty)s
end
for epoch in run:epochs() do
  for x, y in run:batches() do
    %(late)s%(write)s
    run:step(function()
      if o.acc == 1 then
        local loss = loss_of(x, y)
        loss:backward()
        %(step)s
        return loss
      end
      local total = 0
      for xi, yi, share in lt.micro_batches(o.acc, x, y) do
        local loss = loss_of(xi, yi) * share
        loss:backward()
        total = total + loss:item()
      end
      %(step)s
      return total
    end)
  end
  local result = run:evaluate(test, {batch = 8, loss = function(y, labels)
    return lt.cross_entropy(y, labels, %(smooth)g)
  end})
  run:report{top1 = result.top1, test_loss = result.loss}
end
"""

# A loop without lt.run.
BARE = """
for epoch = 1, %(epochs)d do
  for x, y in train:batches{batch = %(batch)d, shuffle = true, epoch = epoch,
                            flip = true, crop = 1} do
    lt.step(function()
      if o.acc == 1 then
        lt.cross_entropy(net(x), y, %(smooth)g):backward()
      else
        for xi, yi, share in lt.micro_batches(o.acc, x, y) do
          (lt.cross_entropy(net(xi), yi, %(smooth)g) * share):backward()
        end
      end
      %(step)s
    end)
  end
end
print("result " .. net:sha256())
"""

NETS = {"plain": (PLAIN, ["c2", "f1", "f2"]), "skip": (SKIP, ["b1", "b2", "f2"]),
        "tied": (TIED, ["c2", "f1", "f2"])}
LOOPS = {"fit": FIT, "run": RUN, "bare": BARE}
SCHEDULES = ["", "schedule = lt.schedule.cosine{warmup = 1}", "schedule = lt.schedule.linear{}",
             "schedule = lt.schedule.step{at = {1}, factor = 0.3}",
             "schedule = function(epoch, epochs) return 1 - 0.9 * epoch / epochs end"]
SCALERS = ["", "scaler = {scale = 2^24, policy = 'dynamic', growth_interval = 3}",
           "scaler = {scale = 2^20}", "scaler = {scale = 1024, policy = 'static'}"]


def draw(r, **fixed):
    """The features of a script. Those in fixed are as given; they do not change the others."""
    f = {"n": r.choice([23, 37, 41, 48]), "batch": r.choice([7, 8, 10, 16]),
         "epochs": r.choice([1, 2, 2, 3]), "net": r.choice(["plain", "plain", "skip", "tied"]),
         "loop": r.choice(["fit", "fit", "run"]),
         "norm": r.choice(["batch_norm", "batch_norm", "group_norm", ""]),
         "act": r.choice(["relu", "gelu", "silu", "tanh"]),
         "pool": r.choice(["max_pool2d", "avg_pool2d"]), "conv_groups": r.choice([1, 1, 2, 4]),
         "drop": r.choice([0, 0.3]), "f64": r.random() < 0.15,
         "amp": r.choice(["off", "off", "bf16", "fp16"]), "scaler": r.choice(SCALERS),
         "optim": r.choice(["sgd", "sgd", "sgd", "adam", "adamw", "lars"]),
         "lr": r.choice([0.01, 0.05]), "momentum": r.choice([0, 0.9]),
         "nesterov": r.random() < 0.2, "decay": r.choice([0, 1e-3]),
         "decay_bias": r.random() < 0.5, "clip": r.choice([0, 0, 0.5]),
         "groups": r.random() < 0.2, "frozen": r.choice(["", "", "c1", "f2"]),
         "late": r.random() < 0.2, "schedule": r.choice(SCHEDULES),
         "mixup": r.choice([0, 0, 0.3]), "smooth": r.choice([0, 0.1]),
         "augment": r.random() < 0.6, "sizes": r.random() < 0.2,
         "penalty": r.random() < 0.2, "held": r.random() < 0.2, "two": r.random() < 0.2,
         "write": r.random() < 0.2}
    f.update(fixed)
    if f["f64"]:
        f["amp"] = "off"
    if f["optim"] in ("adam", "adamw"):
        f["lr"] = f["lr"] / 10
    return f


def settings(f):
    """The settings that lt.fit and lt.run have in common."""
    has = [f["schedule"]]
    if f["amp"] != "off":
        has += [f"amp = '{f['amp']}'"]
    if f["amp"] == "fp16":
        has += [f["scaler"]]
    has += [f"augment = {{{'flip = true, crop = 1' if f['augment'] else ''}}}"]
    if f["mixup"] and f["loop"] == "fit":
        has += [f"mixup = {f['mixup']:g}"]
    if f["sizes"] and f["net"] == "skip" and f["epochs"] > 1:
        has += ["sizes = {{epochs = 1, size = 8}, {size = 12, batch = 5}}"]
    return ", ".join(one for one in has if one)


def inner_of(f):
    return "net.body" if f["f64"] else "net"


def optimizer(f):
    has = [f"lr = {f['lr']:g}", f"weight_decay = {f['decay']:g}",
           f"decay_bias = {str(f['decay_bias']).lower()}"]
    if f["optim"] == "sgd":
        has += [f"momentum = {f['momentum']:g}"]
        if f["nesterov"] and f["momentum"]:
            has += ["nesterov = true"]
    if f["clip"]:
        has += [f"clip = {f['clip']:g}"]
    params, second, inner = "net", "", inner_of(f)
    if f["groups"] or f["two"]:
        rest = NETS[f["net"]][1] + (["n1", "n2"] if f["net"] == "plain" and f["norm"] else [])
        if f["two"]:
            rest = [name for name in rest if name != "f2"]
            second = f"local other = lt.optim.adam({inner}.f2, {{lr = 0.001}})\n"
        rate = f", lr = {f['lr'] / 2:g}" if f["groups"] else ""
        params = (f"{{{{params = {inner}.c1{rate}}}, " +
                  ", ".join(f"{{params = {inner}.{name}}}" for name in rest) + "}")
    return f"local optim = lt.optim.{f['optim']}({params}, {{{', '.join(has)}}})\n{second}"


def text(f):
    """The script with these features."""
    def norm(name, channels, before="", after=", "):
        if not f["norm"]:
            return ""
        of = f"{{2, {channels}}}" if f["norm"] == "group_norm" else f"{{{channels}}}"
        return f"{before}{name} = nn.{f['norm']}{of}{after}"

    inner = inner_of(f)
    if f["net"] == "skip":
        norms = {"n1": norm("n1", 4), "n2": norm("n2", 4, ", ", "")}
    else:
        norms = {"n1": norm("n1", 4), "n2": norm("n2", 8)}
    fill = {**f, **norms, "settings": settings(f), "penalty":
            f" + ({inner}.f2.w * {inner}.f2.w):sum() * 0.01" if f["penalty"] else "",
            "late": f"if run.steps == 3 then {inner}.c1:freeze() end " if f["late"] else "",
            "write": f"if run.steps == 2 and not o.wrote then {inner}.f2.b:fill(0.5) "
                     "o.wrote = true end" if f["write"] else "",
            "optims": "{optim, other}" if f["two"] else "optim",
            "step": "optim:step() other:step()" if f["two"] else "optim:step()"}
    held = f["held"] and f["net"] == "plain" and f["norm"]
    script = HEAD + NETS[f["net"]][0]
    if f["f64"]:
        script += ('net:to "f64"\nnet = nn.module({body = net}, function(self, x) '
                   'return self.body(x:cast "f64") end)\n')
    if f["frozen"]:
        script += f"{inner}.{f['frozen']}:freeze()\n"
    if held:                            # a norm that the script puts into eval mode stays there
        script += f"{inner}.n1:freeze():eval()\n"
    script += optimizer(f) + LOOPS[f["loop"]]
    if held:
        script += f"assert(not {inner}.n1.training and {inner}.d1.training)\n"
    return script % fill


def cuts(f, r, stages):
    """The modules with which the later stages of a pipeline begin, as items of --parallel."""
    names = NETS[f["net"]][1]
    chosen = sorted(r.sample(range(len(names)), stages - 1))
    return ",".join("cut=" + ("body." if f["f64"] else "") + names[i] for i in chosen)


def pipeline(f, r, stages, replicas, micro):
    """The option for a pipeline of the net, with a random division and schedule."""
    schedule = r.choice(["zb", "zb", "1f1b", "gpipe"])
    lag = "" if schedule == "gpipe" else f",lag={r.choice([0, 1, 3])}"
    return (f"--parallel pipe={stages},data={replicas},micro={micro},schedule={schedule}{lag},"
            f"{cuts(f, r, stages)}")
