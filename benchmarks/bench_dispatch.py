"""Measures the overhead that a distributed tensor adds to an operator: Tessera and PyTorch's DTensor in one run.
  bench_dispatch.py [--program build/bin/bench_dispatch] [--min-time 0.05]
Both programs measure the same operators on the same small tensors on one rank, with and without autograd:
the time on a distributed tensor minus the time on a plain tensor. PyTorch's times are measured here
with torch.utils.benchmark. Then the total time of a first call is measured: of each operator after
the plan caches were emptied, and of mm on meshes of 1, 2 and 3 dimensions.
"""

import argparse
import csv
import io
import os
import pathlib
import re
import subprocess
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.benchmark import Timer

import results


# How many of an operator's last inputs are replicated, like weights; all other inputs are Shard(0).
WEIGHTS = {"mm": 1, "addmm": 1, "embedding": 1}
# Operators that are measured only without autograd.
NO_AUTOGRAD = {"mul_", "foreach_add_200", "detach"}
MISSES = 20
REPETITIONS = 7


def cases():
    x = torch.rand(8, 8)
    index = torch.arange(8)
    many = [torch.rand(4) for _ in range(200)]
    return {
        "add": ([x, x], lambda t: torch.add(t[0], t[1])),
        "mul_scalar": ([x], lambda t: torch.mul(t[0], 2.0)),
        "mul_": ([x, x], lambda t: t[0].mul_(t[1])),
        "view": ([x], lambda t: t[0].view(64)),
        "t": ([x], lambda t: t[0].t()),
        "mm": ([x, x], lambda t: torch.mm(t[0], t[1])),
        "addmm": ([x, x, x], lambda t: torch.addmm(t[0], t[1], t[2])),
        "sum": ([x], lambda t: torch.sum(t[0], 1)),
        "softmax": ([x], lambda t: torch.softmax(t[0], -1)),
        "cat": ([x, x], lambda t: torch.cat([t[0], t[1]], 1)),
        "embedding": ([index, x], lambda t: torch.embedding(t[1], t[0])),
        "sdpa": ([torch.rand(2, 2, 4, 8)],
                 lambda t: F.scaled_dot_product_attention(t[0], t[0], t[0])),
        "foreach_add_200": (many + many, lambda t: torch._foreach_add_(t[:200], t[200:])),
        "detach": ([x], lambda t: t[0].detach()),
    }


def microseconds(run, inputs, min_time):
    run(inputs)
    timer = Timer("run(inputs)", globals={"run": run, "inputs": inputs})
    # Takes the fastest block, because other load on the machine can only slow a block down.
    return min(timer.blocked_autorange(min_run_time=min_time).times) * 1e6


def prepared(name, mesh, distribute, record):
    inputs = cases()[name][0]
    split = len(inputs) - WEIGHTS.get(name, 0)
    made = []
    for i, x in enumerate(inputs):
        placement = Shard(0) if i < split else Replicate()
        x = distribute_tensor(x.clone(), mesh, [placement]) if distribute else x.clone()
        made.append(x.requires_grad_() if record and x.is_floating_point() else x)
    return made


def added_by_dtensor(name, mesh, record, min_time):
    run = cases()[name][1]
    with torch.set_grad_enabled(record):
        quickest = {distribute: min(microseconds(run, prepared(name, mesh, distribute, record), min_time)
                                    for _ in range(REPETITIONS))
                    for distribute in (False, True)}
    return quickest[True] - quickest[False]


def first_call(name, mesh):
    run, inputs = cases()[name][1], prepared(name, mesh, True, False)
    quickest = float("inf")
    with torch.no_grad():
        for _ in range(MISSES):
            _clear_sharding_prop_cache()
            start = time.perf_counter()
            run(inputs)
            quickest = min(quickest, (time.perf_counter() - start) * 1e6)
    return quickest


def peer(min_time):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    added = {}
    for name in cases():
        for record in (False,) if name in NO_AUTOGRAD else (False, True):
            try:
                key = name + ("/autograd" if record else "")
                added[key] = added_by_dtensor(name, mesh, record, min_time)
            except (NotImplementedError, RuntimeError) as error:
                print(f"{name}: PyTorch refuses: {str(error).splitlines()[0][:100]}")
        if name in added:
            added[name + "/first"] = first_call(name, mesh)
    dist.destroy_process_group()
    return added


def peer_misses():
    """Returns the times of the first mm with each layout, on simulated ranks without communication."""
    times = {}
    for ndim in (1, 2, 3):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2**ndim)
        mesh = init_device_mesh("cpu", (2,) * ndim)
        rest = [Replicate()] * (ndim - 1)
        whole = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate(), *rest])
        inputs = [DTensor.from_local(torch.ones(4 + i, 4), mesh, [Shard(0), *rest])
                  for i in range(MISSES)]
        quickest = float("inf")
        with torch.no_grad():
            for x in inputs:
                start = time.perf_counter()
                torch.mm(x, whole)
                quickest = min(quickest, (time.perf_counter() - start) * 1e6)
        times[f"mm/miss/{ndim}"] = quickest
        dist.destroy_process_group()
    return times


def tessera(program, min_time):
    text = subprocess.run([program, "--benchmark_format=csv", f"--benchmark_min_time={min_time}",
                           f"--benchmark_repetitions={REPETITIONS}",
                           "--benchmark_enable_random_interleaving=true"],
                          check=True, capture_output=True, text=True).stdout
    times = {}
    for row in csv.reader(io.StringIO(text)):
        name = re.sub("/(iterations|repeats):.*", "", row[0]) if row else ""
        if name.endswith(("/plain", "/distributed")) or re.fullmatch(r"mm/miss/\d|.*/first", name):
            times.setdefault(name, []).append(float(row[3]) / 1000)
    # The fastest repetition, as for PyTorch. For first calls the first repetition, because later ones find its
    # caches.
    best = {name: some[0] if "/miss/" in name else min(some) for name, some in times.items()}
    added = {name[:-len("/plain")]: best[name.replace("/plain", "/distributed")] - time_
             for name, time_ in best.items() if name.endswith("/plain")}
    added.update((name, time_) for name, time_ in best.items() if re.search("/miss/|/first", name))
    return {name: added[name] for name in sorted(added)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="build/bin/bench_dispatch")
    parser.add_argument("--min-time", type=float, default=0.05)
    parser.add_argument("--out", type=pathlib.Path, help="writes the raw results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours = tessera(options.program, options.min_time)
    theirs = {**peer(options.min_time), **peer_misses()}
    print(f"{'added, microseconds':24}{'Tessera':>10}{'PyTorch':>10}{'ratio':>8}")
    for name, added in ours.items():
        other = theirs.get(name)
        if other is None:
            print(f"{name:24}{added:10.2f}")
        else:
            print(f"{name:24}{added:10.2f}{other:10.2f}{other / max(added, 1e-3):8.0f}")
    if options.out:
        results.write(options.out, {"tessera_us": ours, "pytorch_us": theirs})


if __name__ == "__main__":
    main()
