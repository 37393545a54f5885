#!/usr/bin/env python3
"""bench_torch.py - the peer of tools/bench and gpu_bench: the same nets and training in PyTorch.

    bench_torch.py version
    bench_torch.py step --model resnet50 --dtype bf16 --batch 16 --threads 2 --channels-last
    bench_torch.py pipeline --model vgg16 --batch 8 --cut stage4 --micro 4 --schedule 1f1b
    bench_torch.py modes --device cuda --model resnet50 --dtype fp16 --batch 256 --modes eager,graph
    bench_torch.py train --to 0.92 --data DIR --threads 2 --channels-last

Written for speed, as a user would: gradients set to none, operations in place, the fused optimizer,
autocast for bf16, data in memory. Prints one line of JSON.
"""
import argparse
import gc
import gzip
import json
import math
import os
import resource
import tempfile
import time
from statistics import median

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributed, multiprocessing

# ==== Nets: the ones in models/ ===================================================================


def conv(c_in, c, kernel, stride=1, groups=1):
    return nn.Conv2d(c_in, c, kernel, stride, kernel // 2, groups=groups, bias=False)


def norm_relu(c):
    return [nn.BatchNorm2d(c), nn.ReLU(inplace=True)]


def shortcut(c_in, c, stride):
    if c_in == c and stride == 1:
        return nn.Identity()
    return nn.Sequential(conv(c_in, c, 1, stride), nn.BatchNorm2d(c))


class Basic(nn.Module):
    widen = 1

    def __init__(self, c_in, c, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(c_in, c, 3, stride), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = conv(c, c, 3), nn.BatchNorm2d(c)
        self.shortcut = shortcut(c_in, c, stride)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class Bottleneck(nn.Module):
    widen = 4

    def __init__(self, c_in, c, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(c_in, c, 1), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = conv(c, c, 3, stride), nn.BatchNorm2d(c)
        self.conv3, self.bn3 = conv(c, 4 * c, 1), nn.BatchNorm2d(4 * c)
        self.shortcut = shortcut(c_in, 4 * c, stride)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


def residual(layers, block, counts, c, classes):
    c_in = c
    for i, count in enumerate(counts):
        for k in range(count):
            layers.append(block(c_in, c, 2 if i > 0 and k == 0 else 1))
            c_in = block.widen * c
        c *= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, classes))


def resnet20():
    return residual([conv(1, 16, 3), *norm_relu(16)], Basic, (3, 3, 3), 16, 10)


def resnet50():
    stem = [conv(3, 64, 7, 2), *norm_relu(64), nn.MaxPool2d(3, 2, 1)]
    return residual(stem, Bottleneck, (3, 4, 6, 3), 64, 1000)


def mobilenet_v1():
    layers, c_in = [conv(3, 32, 3, 2), *norm_relu(32)], 32
    for c, stride in [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1), (512, 1),
                      (512, 1), (512, 1), (512, 1), (1024, 2), (1024, 1)]:
        layers += [conv(c_in, c_in, 3, stride, groups=c_in), *norm_relu(c_in)]
        layers += [conv(c_in, c, 1), *norm_relu(c)]
        c_in = c
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, 1000))


def vgg16(side=224):
    layers, c_in = [], 3
    for c, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(count):
            layers += [nn.Conv2d(c_in, c, 3, padding=1), nn.ReLU(inplace=True)]
            c_in = c
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for n_in in ((side // 32) ** 2 * 512, 4096):
        layers += [nn.Linear(n_in, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


def lenet():
    layers, c_in = [], 1
    for c in (32, 64):
        layers += [nn.Conv2d(c_in, c, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        c_in = c
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(7 * 7 * 64, 128), nn.ReLU(inplace=True),
                         nn.Linear(128, 10))


SMALL, LARGE = (1, 28, 28, 10), (3, 224, 224, 1000)            # channels, height, width, classes
MODELS = {'lenet': (lenet, SMALL), 'resnet20': (resnet20, SMALL),
          'mobilenet_v1': (mobilenet_v1, LARGE), 'resnet50': (resnet50, LARGE),
          'vgg16': (vgg16, LARGE)}


# ==== Shared by all measurements ==================================================================


def layout(o):
    return torch.channels_last if o.channels_last else torch.contiguous_format


def half(o):
    return torch.autocast('cpu', torch.bfloat16, enabled=o.dtype == 'bf16')


def learn(o, net, optimizer, x, y):
    optimizer.zero_grad(set_to_none=True)
    with half(o):
        loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()


def peak_rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


LOADED = peak_rss()                                            # of PyTorch itself


def say(**fields):
    print(json.dumps({'peak_rss_bytes': peak_rss(), 'loaded_rss_bytes': LOADED, **fields}),
          flush=True)


# ==== Steps of a net on random images =============================================================


def step(o, rank=0):
    make, (channels, height, width, classes) = MODELS[o.model]
    net = make().to(memory_format=layout(o))
    x = torch.randn(o.batch, channels, height, width).to(memory_format=layout(o))
    y = torch.randint(classes, (o.batch,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4,
                                fused=True)
    called = torch.compile(net) if o.compile else net
    if o.ranks > 1:
        called = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    times = time_steps(o, lambda: learn(o, called, optimizer, x, y))
    if rank == 0:
        say_rates(o.ranks * o.batch, times)


def time_steps(o, run):
    """The times of steps after the warm-up, in seconds."""
    times = []
    for i in range(1 << 30):
        before = time.perf_counter()
        run()
        if i >= o.warm_up:
            times.append(time.perf_counter() - before)
        if is_enough(o, times):
            return times


def say_rates(images, times):
    say(images_per_s=images / median(times), best_images_per_s=images / min(times),
        steps=len(times))


def is_enough(o, times):
    enough = len(times) >= o.steps and sum(times) >= o.seconds
    if o.ranks > 1 and o.seconds > 0:                          # all ranks end after the same step
        first = torch.tensor([enough])
        distributed.broadcast(first, 0)
        enough = bool(first)
    return enough


def run_rank(rank, o, where):
    torch.set_num_threads(o.threads)
    torch.manual_seed(o.seed + rank)
    distributed.init_process_group('gloo', init_method=where, rank=rank, world_size=o.ranks)
    {'step': step, 'pipeline': pipeline}[o.what](o, rank)
    distributed.destroy_process_group()


def run_ranks(o):
    """Runs a process per rank, as DistributedDataParallel requires. They communicate with gloo. If
    a launcher has started them and set RANK, this process is one of them."""
    if 'RANK' in os.environ:
        run_rank(int(os.environ['RANK']), o, 'env://')
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (o, f'file://{folder}/store'), o.ranks)


# ==== Steps in a pipeline of two ranks ============================================================

# The names in models/ of the layers and blocks that have parameters, in order.
PARTS = {'vgg16': [f'stage{i}.conv{k}' for i, n in enumerate((2, 2, 3, 3, 3), 1)
                   for k in range(1, n + 1)] + [f'classifier.fc{i}' for i in (1, 2, 3)],
         'lenet': ['conv1', 'conv2', 'fc1', 'fc2'],
         'resnet50': ['conv1', 'bn1', *(f'stage{i}.{k}' for i, n in enumerate((3, 4, 6, 3), 1)
                                        for k in range(1, n + 1)), 'fc']}
SCHEDULES = {'gpipe': 'GPipe', '1f1b': '1F1B', 'zb': 'InterleavedZeroBubble'}


def divide(o, net):
    """The two stages of a net. The second one begins with the layer or block o.cut."""
    begins = [i for i, part in enumerate(net) if next(part.parameters(), None) is not None]
    for name, begin in zip(PARTS[o.model], begins, strict=True):
        if begin > 0 and f'{name}.'.startswith(f'{o.cut}.'):
            return net[:begin], net[begin:]
    raise SystemExit(f"bench_torch.py: --cut: {o.model} has no layer '{o.cut}' after its first one")


class Permute(nn.Module):
    def __init__(self, *order):
        super().__init__()
        self.order = order

    def forward(self, x):
        return x.permute(self.order)


def stages(o, net):
    """The two stages, ready for gloo, which sends only contiguous tensors. With channels_last, the
    values between them are permuted to (n, h, w, c), which copies nothing."""
    first, second = (part.to(memory_format=layout(o)) for part in divide(o, net))
    if not o.channels_last or isinstance(first[-1], nn.Flatten):
        return first, second
    return nn.Sequential(*first, Permute(0, 2, 3, 1)), nn.Sequential(Permute(0, 3, 1, 2), *second)


# The loss of a micro-batch is divided by their number, which is faster than scale_grads.
def pipeline(o, rank):
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules
    make, (channels, height, width, classes) = MODELS[o.model]
    part = stages(o, make())[rank]
    kind = schedules.get_schedule_class(SCHEDULES[o.schedule])
    stage = pipelining.PipelineStage(part, rank, o.ranks, torch.device('cpu'))
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    schedule = kind([stage] if several else stage, o.micro, scale_grads=False,
                    loss_fn=lambda logits, y: F.cross_entropy(logits, y) / o.micro)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4,
                                fused=True)
    x = torch.randn(o.batch, channels, height, width).to(memory_format=layout(o))
    given = ([x], {}) if rank == 0 else ([], {'target': torch.randint(classes, (o.batch,))})

    def run():
        optimizer.zero_grad(set_to_none=True)
        schedule.step(*given[0], **given[1], return_outputs=False)
        optimizer.step()

    times = time_steps(o, run)
    if rank == 0:
        say_rates(o.batch, times)


# ==== Steps in several modes, on a GPU ============================================================

# By --dtype: the dtype of autocast, whether losses are scaled, whether matmuls may use TF32.
PRECISIONS = {'f32': (None, False, False), 'tf32': (None, False, True),
              'bf16': (torch.bfloat16, False, True), 'fp16': (torch.float16, True, True)}


class Training:
    """A net and its training step, in channels_last. Its tensors keep their addresses, so that the
    step can be captured as a CUDA graph."""

    def __init__(self, o):
        self.o = o
        self.dtype, scaled, tf32 = PRECISIONS[o.dtype]
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        make, (channels, side, _, classes) = MODELS[o.model]
        side = o.side or side
        net = make(side) if make is vgg16 else make()
        self.net = self.called = net.to(o.device, memory_format=torch.channels_last)
        self.x = torch.randn(o.batch, channels, side, side, device=o.device)
        self.x = self.x.to(memory_format=torch.channels_last)
        self.y = torch.randint(classes, (o.batch,), device=o.device)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9,
                                         weight_decay=1e-4, fused=True)
        self.scaler = torch.amp.GradScaler(o.device, enabled=scaled)

    def step(self, cache=True):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.o.device, self.dtype, enabled=self.dtype is not None,
                            cache_enabled=cache):
            loss = F.cross_entropy(self.called(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def graph(self):
        """Captures the whole step as a CUDA graph. Returns the function that replays it."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self.step(cache=False)
        torch.cuda.current_stream().wait_stream(beside)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(cache=False)
        return graph.replay


def seconds_of(o, run):
    """The time of o.steps runs. On a GPU, CUDA events measure it, with one wait at the end."""
    if o.device == 'cpu':
        before = time.perf_counter()
        for _ in range(o.steps):
            run()
        return time.perf_counter() - before
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(o.steps):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def measure(o, mode):
    on_gpu = o.device != 'cpu'
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    training = Training(o)
    if mode == 'compile':
        training.called = torch.compile(training.net, mode='max-autotune')
    run = training.graph() if mode == 'graph' else training.step
    for _ in range(o.warm_up):
        run()
    times = []
    while len(times) < 3 or sum(times) < o.seconds:
        times.append(seconds_of(o, run))
    rate = o.steps * o.batch
    return {'images_per_s': rate / median(times), 'best_images_per_s': rate / min(times),
            'peak_bytes': torch.cuda.max_memory_allocated() if on_gpu else peak_rss()}


# Streams, events, graphs and memory statistics belong to the current device, wherever the tensors
# are. It is the first device unless set_device() selects another.
def choose_device(o):
    device = torch.device(o.device)
    if device.index is not None:
        torch.cuda.set_device(device)
        o.device = device.type


# Measures each mode in turn. Prints the results so far after each: its result, or
# {'failed': reason}.
def modes(o):
    choose_device(o)
    found, device = {}, torch.cuda.get_device_name() if o.device != 'cpu' else 'cpu'
    for mode in o.modes.split(','):
        try:
            found[mode] = measure(o, mode)
        except torch.OutOfMemoryError:
            found[mode] = {'failed': 'out of memory'}
        except Exception as e:                                 # does not stop the other modes
            found[mode] = {'failed': (str(e).strip().splitlines() or [type(e).__name__])[0][:200]}
        gc.collect()
        if o.device != 'cpu':
            torch.cuda.empty_cache()
        say(modes=found, device=device)


# ==== The training of models/train_resnet.lua =====================================================


def read_idx(folder, name):
    path = os.path.join(folder, name)
    whole = (gzip.open(path + '.gz') if os.path.exists(path + '.gz') else open(path, 'rb')).read()
    dims = [int.from_bytes(whole[4 + 4 * i:8 + 4 * i], 'big') for i in range(whole[3])]
    return torch.frombuffer(bytearray(whole[4 + 4 * len(dims):]), dtype=torch.uint8).view(dims)


def read_part(o, part):
    images = read_idx(o.data, part + '-images-idx3-ubyte').unsqueeze(1)
    labels = read_idx(o.data, part + '-labels-idx1-ubyte').long()
    images = ((images.float() / 255 - 0.2860) / 0.3530).contiguous(memory_format=layout(o))
    return images, labels


def factor(epoch, o):
    if epoch < o.warm_up:
        return epoch / o.warm_up
    return 0.5 * (1 + math.cos(math.pi * (epoch - o.warm_up) / (o.epochs - o.warm_up)))


def evaluate(o, net, images, labels):
    hits = 0
    net.eval()
    with torch.inference_mode(), half(o):
        for x, y in zip(images.split(500), labels.split(500)):
            hits += (net(x).argmax(1) == y).sum().item()
    net.train()
    return hits / len(labels)


def train_epoch(o, net, optimizer, images, labels, epoch):
    order, n = torch.randperm(len(labels)), len(labels)
    for first in range(0, n, o.batch):
        some = order[first:first + o.batch]
        x = images[some]
        x = torch.where((torch.rand(len(some)) < 0.5)[:, None, None, None], x.flip(3), x)
        for group in optimizer.param_groups:
            group['lr'] = o.lr * factor(epoch + (first + len(some) / 2) / n, o)
        learn(o, net, optimizer, x.contiguous(memory_format=layout(o)), labels[some])


def train(o):
    began = time.perf_counter()
    images, labels = read_part(o, 'train')
    test_images, test_labels = read_part(o, 't10k')
    net = resnet20()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode='fan_out', nonlinearity='relu')
    net = net.to(memory_format=layout(o))
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD([{'params': decayed, 'weight_decay': 5e-4}, {'params': others}],
                                lr=o.lr, momentum=0.9, nesterov=True, fused=True)
    top1, epoch = 0.0, 0
    while top1 < o.to and epoch < o.epochs:
        train_epoch(o, net, optimizer, images, labels, epoch)
        epoch += 1
        top1 = evaluate(o, net, test_images, test_labels)
    say(reached=top1 >= o.to, seconds=time.perf_counter() - began, epoch=epoch, top1=top1)


# ==================================================================================================


def main():
    p = argparse.ArgumentParser(description='the peer of tools/bench')
    p.add_argument('what', choices=['version', 'step', 'pipeline', 'modes', 'train'])
    p.add_argument('--dtype', choices=PRECISIONS, default='f32')
    p.add_argument('--threads', type=int, default=1)
    p.add_argument('--channels-last', action='store_true')
    p.add_argument('--batch', type=int, default=128)
    p.add_argument('--model', choices=MODELS, default='resnet20')
    p.add_argument('--compile', action='store_true')
    p.add_argument('--device', default='cpu', help='modes')
    p.add_argument('--modes', default='eager,graph', help='modes: eager, graph, compile')
    p.add_argument('--side', type=int, default=0, help='modes: side of images; 0: that of the net')
    p.add_argument('--ranks', type=int, default=1)
    p.add_argument('--cut', default='', help='pipeline: where the second stage begins')
    p.add_argument('--micro', type=int, default=4, help='pipeline: micro-batches')
    p.add_argument('--schedule', choices=SCHEDULES, default='1f1b', help='pipeline')
    p.add_argument('--warm-up', type=int, default=1, help='step: steps; train: epochs')
    p.add_argument('--steps', type=int, default=3, help='step: minimum number')
    p.add_argument('--seconds', type=float, default=3.0, help='step: minimum duration')
    p.add_argument('--data', default='/usr/share/datasets/fashion-mnist')
    p.add_argument('--epochs', type=int, default=3)
    p.add_argument('--lr', type=float, default=0.2)
    p.add_argument('--to', type=float, default=0.92, help='train: top-1 to reach')
    p.add_argument('--seed', type=int, default=0)
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(o.seed)
    if o.what == 'version':
        say(version=torch.__version__)
    else:
        {'train': train, 'modes': modes, 'pipeline': run_ranks,
         'step': run_ranks if o.ranks > 1 else step}[o.what](o)


if __name__ == '__main__':
    main()
