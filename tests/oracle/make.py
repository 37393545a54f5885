#!/usr/bin/env python3
"""Writes the fixtures that the tests compare luatrain with, using PyTorch in float64.

    tests/oracle/make.py             all of them, in this folder
    tests/oracle/make.py ops         ops.safetensors: the cases of tests/ops/cases.txt
    tests/oracle/make.py models      lenet.safetensors, resnet20.safetensors: 50 steps of training
    tests/oracle/make.py check PREFIX f32 f16 bf16
                                     PREFIXf32.safetensors and so on, for tools/gpu_check: the cases
                                     with inputs rounded to that dtype, and all of the results

The fixtures were made with PyTorch 2.15, on the CPU. Inputs and upstream gradients of
ops.safetensors depend only on the case's text and are not stored: cases.h computes the same ones. A
tensor in that file is named HASH.WHAT. HASH is a hash of the case's first four fields, so that a
changed case does not find outdated values. WHAT is out.K, grad.NAME (the gradient of the sum over K
of out.K times its upstream gradient) or after.NAME (an input that the op writes). It ends in .sums
if keep() stores sums instead of the tensor.
"""
import json
import random
import struct
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}


def save(path, tensors):
    """Writes a safetensors file: the length of the header, the header, the data."""
    header, blobs, end = {}, [], 0
    for name, t in tensors.items():
        t = t.detach().contiguous()
        blob = t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape),
                        "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    print(f"{path.name}: {len(tensors)} tensors, {path.stat().st_size} bytes")


def load(path):
    """Reads a file of save()."""
    data, dtypes = path.read_bytes(), {text: dtype for dtype, text in DTYPES.items()}
    end = 8 + struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, entry in json.loads(data[8:end]).items():
        first, last = (end + offset for offset in entry["data_offsets"])
        x = torch.tensor(list(data[first:last]), dtype=torch.uint8)
        found[name] = x.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found


def nearly_equal(x, y):
    """Whether two tensors differ only by rounding, which depends on the CPU."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if not x.is_floating_point() or not x.numel():
        return torch.equal(x, y)
    largest = x.nan_to_num(0, 0, 0).abs().max().item()
    return torch.allclose(x, y, rtol=0, atol=1e-13 * largest, equal_nan=True)


# ==== Functions for the expressions in cases.txt: luatrain's layouts outside, PyTorch's inside ====

def nchw(x):
    return x.permute(0, 3, 1, 2)     # also (out, kh, kw, in) -> (out, in, kh, kw)


def nhwc(x):
    return x.permute(0, 2, 3, 1)


def conv2d(x, w, b=None, **options):
    return nhwc(F.conv2d(nchw(x), nchw(w), b, **options))


def max_pool2d(x, *options):
    return nhwc(F.max_pool2d(nchw(x), *options))


def avg_pool2d(x, *options):
    return nhwc(F.avg_pool2d(nchw(x), *options))


def batch_norm(x, scale, shift, mean, var, *options):
    """Batch norm with channels last. In training, PyTorch writes the running mean and var."""
    x = x.movedim(-1, 1)
    return F.batch_norm(x, mean.detach(), var.detach(), scale, shift, *options).movedim(1, -1)


def merge(mean, var, mean2, var2, n, n2):
    """Writes the mean and biased variance of both sets together, computed from raw moments."""
    m = (n * mean + n2 * mean2) / (n + n2)
    square = (n * (var + mean**2) + n2 * (var2 + mean2**2)) / (n + n2)
    mean.detach().copy_(m)
    var.detach().copy_(square - m**2)
    return ()


def running(running_mean, running_var, mean, var, n, momentum):
    """Updates the running values as F.batch_norm does, with the unbiased variance."""
    running_mean.detach().lerp_(mean, momentum)
    running_var.detach().lerp_(var * n / (n - 1), momentum)
    return ()


def add_squares(total, x):
    """Adds the sum of the squares of x to total."""
    total.detach().add_(x.detach().square().sum())
    return ()


def step(kind, w, g, *state, t=1, **options):
    """Updates w and the optimizer's state like step t of the torch.optim class `kind`."""
    p = w.detach().requires_grad_()
    p.grad = g.detach().clone()
    optim = kind([p], foreach=False, **options)
    names = {0: (), 1: ("momentum_buffer",), 2: ("exp_avg", "exp_avg_sq")}[len(state)]
    optim.state[p] = {name: s.detach() for name, s in zip(names, state)}
    if len(state) == 2:
        optim.state[p]["step"] = torch.tensor(t - 1.0)
    optim.step()
    return ()


def lars(w, g, v, lr, momentum=0.9, weight_decay=0.0, trust=0.001, eps=1e-8):
    """A LARS step, by the formula of You, Gitman and Ginsburg; PyTorch has no LARS."""
    w, g, v = w.detach(), g.detach(), v.detach()
    w_norm, g_norm = w.square().sum().sqrt(), g.square().sum().sqrt()
    known = w_norm > 0 and g_norm > 0
    q = trust * w_norm / (g_norm + weight_decay * w_norm + eps) if known else 1
    v.copy_(momentum * v + q * (g + weight_decay * w))
    w.sub_(lr * v)
    return ()


def dc_grad(g, w, backup, ms=None, *, lam, rho=0.95, weight_decay=0.0):
    """Corrects g for its delay, by the formula of DC-ASGD; with ms its adaptive version."""
    g, w, backup = g.detach(), w.detach(), backup.detach()
    d = g + weight_decay * w
    if ms is not None:
        ms = ms.detach()
        ms.copy_(rho * ms + (1 - rho) * d.square())
        lam = lam / (ms + 1e-7).sqrt()
    g.add_(lam * d.square() * (w - backup))
    return ()


def gap_grad(g, w, backup, v, ms, *, lr, correction, rho=0.999, weight_decay=0.0):
    """Divides g and the weight decay by the penalty of gap-aware training."""
    g, w, backup, v, ms = (x.detach() for x in (g, w, backup, v, ms))
    ms.copy_(rho * ms + (1 - rho) * v.square())
    penalty = 1 + (w - backup).abs() / (lr * (ms / correction).sqrt() + 1e-8)
    g.copy_((g + weight_decay * w) / penalty - weight_decay * w)
    return ()


def ddc(w, g, v, s, backup, stats, *, lr, r, q, momentum=0.9, weight_decay=0.0, lam=20.0, cap=1.0,
        rho=0.95):
    """A step of DDC-ASGD."""
    w, g, v, s, backup, stats = (x.detach() for x in (w, g, v, s, backup, stats))
    s.copy_(rho * s + (1 - rho) * g.square())
    c = lam * g.square() * (w - backup) / (s + 1e-7).sqrt()
    c_norm, g_norm = c.square().sum().sqrt(), g.square().sum().sqrt()
    factor = min(1.0, cap * g_norm / (c_norm + 1e-7)) if c_norm > 0 else 1.0
    d = q * (g + factor * c + weight_decay * w)
    w.sub_(lr * (momentum * v + d))
    v.copy_(momentum * v + r * d)
    stats.add_(torch.tensor([factor * c_norm / g_norm if g_norm > 0 else 0.0, factor < 1, 1]))
    return ()


def ordered(w, g, v, *, lr, late, opens=False, momentum=0.9, weight_decay=0.0):
    """A step of Ordered Momentum, with its sums written out."""
    w, g, v = w.detach(), g.detach(), v.detach()
    d = g + weight_decay * w
    if opens:
        v.mul_(momentum)
        w.sub_(lr * v)
    v.add_(momentum**late * d)
    w.sub_(lr * sum(momentum**j for j in range(late + 1)) * d)
    return ()


HELPERS = {"torch": torch, "F": F, "SGD": torch.optim.SGD, "Adam": torch.optim.Adam,
           "AdamW": torch.optim.AdamW, "conv2d": conv2d, "max_pool2d": max_pool2d,
           "avg_pool2d": avg_pool2d, "batch_norm": batch_norm, "merge": merge, "running": running,
           "add_squares": add_squares, "step": step, "lars": lars,
           "dc_grad": dc_grad, "gap_grad": gap_grad, "ddc": ddc, "ordered": ordered}


# ==== The cases ====

def fnv1a(text):
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return f"{h:016x}"


def uniform(seed, n, draws=4):
    """(draws, n) numbers in [0, 1) from splitmix64, the same as in cases.h."""
    z = np.arange(1, draws * n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(int(seed, 16))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(11)) * 2.0**-53).reshape(n, draws).T


def normal(seed, n):
    u = uniform(seed, n)
    return (u[0] + u[1] + u[2] + u[3] - 2) * 1.7320508075688772


def values(kind, n, seed):
    """n numbers of a kind in cases.txt; cases.h computes the same ones."""
    i, u = np.arange(n), uniform(seed, n)
    makers = {
        "normal": lambda: normal(seed, n),
        "offset": lambda: normal(seed, n) + 100,
        "wide": lambda: normal(seed, n) * 300,
        "positive": lambda: 0.5 + 1.5 * u[0],
        "away": lambda: (np.floor(24 * u[0]) - 12) / 4 + 0.03 + 0.19 * u[1],
        "distinct": lambda: (i * 7919 % n - n // 2) * 3 / 64 + u[0] / 64,
        "kinks": lambda: np.array([-1.0, 0, 0, 1, 6])[(5 * u[0]).astype(int)],
        "special": lambda: np.array([np.nan, np.inf, -np.inf, 0, -1, 2])[i % 6],
        "mask": lambda: u[0] < 0.5,
    }
    if kind.startswith("ids"):
        return np.floor(int(kind[3:].removesuffix("i32").removesuffix("u8")) * u[0])
    return makers[kind]() if kind in makers else np.full(n, float(kind))


def dtype_of(kind):
    if kind == "mask" or kind.endswith("u8"):
        return torch.uint8
    if kind.startswith("ids"):
        return torch.int32 if kind.endswith("i32") else torch.int64
    return torch.float64


def rounded(x, dtype):
    """x, a float64, rounded to dtype once; x.to(dtype) may round to float32 first."""
    digits, least = {torch.float64: (53, -1074), torch.float32: (24, -149),
                     torch.float16: (11, -24), torch.bfloat16: (8, -133)}[dtype]
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (exponent - digits).clamp(min=least))
    return torch.where(x.isfinite(), torch.round(x / step) * step, x)


def make_input(key, name, spec, dtype):
    kind, dims = spec[:-1].split("(")
    dims = [int(d) for d in dims.split(",") if d]
    x = torch.tensor(values(kind, torch.Size(dims).numel(), fnv1a(f"{key} {name}")))
    x = x.to(dtype_of(kind)).reshape(dims)
    if x.is_floating_point():
        x = rounded(x, dtype)
    return x.requires_grad_(x.is_floating_point())


def parse_inputs(text):
    for part in text.replace("), ", ");").split(";"):
        name, spec = part.split("=")
        yield name.strip(), spec.strip()


def keep(found, name, x, whole):
    """Stores x if it has up to 512 elements, otherwise 16 sums, each of every 16th element."""
    if x.numel() > 512 and not whole:
        weights = torch.tensor(2 * uniform(fnv1a("sums"), x.numel(), 1)[0] - 1)
        terms = x.detach().double().reshape(-1) * weights
        name, x = f"{name}.sums", F.pad(terms, (0, -x.numel() % 16)).reshape(-1, 16).sum(0)
    found[name] = x.to(torch.uint8) if x.dtype == torch.bool else x


def evaluate(key, fields, dtype=torch.float64, whole=False):
    """Returns all tensors of one case, under their names. Inputs are rounded to dtype."""
    found, pairs = {}, []
    inputs = {name: make_input(key, name, spec, dtype) for name, spec in parse_inputs(fields[1])}
    before = {name: x.detach().clone() for name, x in inputs.items()}
    outputs = eval(fields[3], HELPERS | inputs)
    for k, y in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
        keep(found, f"{key}.out.{k}", y, whole)
        if y.requires_grad and "forward" not in fields[4].split(":")[0]:
            dy = rounded(torch.tensor(normal(fnv1a(f"{key} dy {k}"), y.numel())), dtype)
            pairs.append((y, dy.to(y.dtype).reshape(y.shape)))
    for name, x in inputs.items():
        if not torch.equal(x.detach().nan_to_num(), before[name].nan_to_num()):
            keep(found, f"{key}.after.{name}", x, whole)
    wanted = [name for name, x in inputs.items() if x.requires_grad]
    if pairs:
        ys, dys = zip(*pairs)
        grads = torch.autograd.grad(ys, [inputs[name] for name in wanted], dys, allow_unused=True)
        for name, g in zip(wanted, grads):
            if g is not None:
                keep(found, f"{key}.grad.{name}", g, whole)
    return found


def evaluate_all(dtype, whole):
    """Returns the tensors of all cases."""
    found, keys = {}, set()
    for line in (HERE.parent / "ops" / "cases.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        fields = [f.strip() for f in line.split("|")] + [""]
        key = fnv1a(" | ".join(fields[:4]))
        if key in keys:
            sys.exit(f"this case is there twice: {line}")
        keys.add(key)
        try:
            found |= evaluate(key, fields, dtype, whole)
        except Exception as e:
            sys.exit(f"{line}\n{type(e).__name__}: {e}")
    print(f"{len(keys)} cases")
    return found


def make_ops():
    """Writes ops.safetensors. A tensor that is there already keeps its bits if it is as good."""
    path = HERE / "ops.safetensors"
    old = load(path) if path.exists() else {}
    found = evaluate_all(torch.float64, False)
    for name in found.keys() & old.keys():
        if nearly_equal(found[name], old[name]):
            found[name] = old[name]
    save(path, found)


def make_check(prefix, dtypes):
    known = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    for name in dtypes:
        save(Path(f"{prefix}{name}.safetensors"), evaluate_all(known[name], True))


# ==== Trajectories: 50 steps of training, with weights and images stored in the fixture ====

class LeNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = torch.nn.Linear(7 * 7 * 64, 128)
        self.fc2 = torch.nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(nhwc(x).flatten(1)))
        return self.fc2(x)


class Block(torch.nn.Module):
    """Two 3x3 convolutions, with a 1x1 convolution as shortcut if the shape changes."""

    def __init__(self, c_in, c, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(c_in, c, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(c)
        self.conv2 = torch.nn.Conv2d(c, c, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(c)
        if stride > 1:
            self.conv3 = torch.nn.Conv2d(c_in, c, 1, stride, bias=False)
            self.bn3 = torch.nn.BatchNorm2d(c)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (self.bn3(self.conv3(x)) if hasattr(self, "conv3") else x))


class ResNet20(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(16)
        shapes = [(16, 16, 1), (16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 1),
                  (32, 64, 2), (64, 64, 1), (64, 64, 1)]
        self.blocks = torch.nn.Sequential(*(Block(*s) for s in shapes))
        self.fc = torch.nn.Linear(64, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


def images(n, size, channels, rng):
    """Noise with a bright square, whose position and channel depend on the class."""
    labels = [i % 10 for i in range(n)]
    x = torch.tensor([rng.random() for _ in range(n * size * size * channels)])
    x = x.reshape(n, size, size, channels)
    for i, label in enumerate(labels):
        top, left, side = label // 5 * size // 2, label % 5 * size // 6, size // 3
        x[i, top:top + side, left:left + side, label % channels] += 1
    return x, torch.tensor(labels)


def train(net, x, labels, lr, steps):
    """Returns the loss of each batch of 8 before its SGD step, and last of all in eval mode."""
    dtype = next(net.parameters()).dtype
    optim = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    losses = []
    for i in range(steps):
        rows = slice(i * 8 % len(x), i * 8 % len(x) + 8)
        loss = F.cross_entropy(net(nchw(x[rows].to(dtype))), labels[rows])
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    net.eval()
    losses.append(F.cross_entropy(net(nchw(x.to(dtype))), labels).item())
    return torch.tensor(losses, dtype=torch.float64)


def luatrain_name(name):
    """Converts blocks.0.conv1.weight to blocks.1.conv1.w; a batch norm has scale and shift."""
    parts = [str(int(part) + 1) if part.isdigit() else part for part in name.split(".")]
    *path, layer, kind = parts
    norm = layer.startswith("bn")
    kind = {"weight": "scale" if norm else "w", "bias": "shift" if norm else "b"}[kind]
    return ".".join(path + [layer, kind])


def make_model(make, seed, lr, size, channels):
    """Writes PyTorch's initial weights, rounded to bf16 to keep the file small, and its losses.

    If a ReLU is active in one program and inactive in the other, the later losses of a batch of 8
    differ. Of the four million ReLU inputs of ResNet-20 in 10 steps, some are within f32 rounding
    of zero. Its seed and rate were chosen so that these matter little: in 25 trials, relative
    changes of the weights by 3e-7 changed no f32 loss by more than 3e-5.
    """
    name = make.__name__.lower()
    torch.manual_seed(seed)
    start = {k: p.detach().bfloat16() for k, p in make().named_parameters()}
    x, labels = images(32, size, channels, random.Random(name))
    found = {"images": x, "labels": labels}
    for dtype, steps in (torch.float64, 50), (torch.float32, 10):
        net = make().to(dtype)
        with torch.no_grad():
            for k, p in net.named_parameters():
                p.copy_(start[k])
        found[f"loss.{DTYPES[dtype].lower()}"] = losses = train(net, x, labels, lr, steps)
        print(f"{name} {dtype}: loss {losses[0]:.4f} to {losses[-2]:.4f}, "
              f"evaluated {losses[-1]:.4f}")
    for k, p in start.items():
        found[luatrain_name(k)] = nhwc(p) if p.dim() == 4 else p
    save(HERE / f"{name}.safetensors", found)


def main(what, arguments):
    if what not in ("all", "ops", "models", "check") or (what == "check") != bool(arguments):
        sys.exit(__doc__)
    torch.set_num_threads(1)
    if what == "check":
        make_check(arguments[0], arguments[1:])
    if what in ("all", "ops"):
        make_ops()
    if what in ("all", "models"):
        make_model(LeNet, seed=1, lr=0.005, size=28, channels=1)
        make_model(ResNet20, seed=8, lr=0.0001, size=16, channels=3)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "all", sys.argv[2:])
