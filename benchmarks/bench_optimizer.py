"""Optimizer steps and clipping over 50 distributed parameters: Tessera beside PyTorch, in one run.

  bench_optimizer.py [--program build/bin/bench_optimizer] [--min-time 0.2]

Both on one rank and one thread, parameters Shard(0): PyTorch's are DTensors with the fused AdamW,
the foreach SGD and torch.nn.utils.clip_grad_norm_. All of it is measured on plain
tensors too.
"""

import argparse
import csv
import io
import os
import subprocess

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.benchmark import Timer

PARAMETERS = 50


def parameters(size, mesh):
    made = []
    for _ in range(PARAMETERS):
        value, grad = torch.rand(size, size), torch.rand(size, size)
        if mesh is not None:
            value, grad = (distribute_tensor(x, mesh, [Shard(0)]) for x in (value, grad))
        made.append(torch.nn.Parameter(value))
        made[-1].grad = grad
    return made


def step_of(name, made):
    if name == "clip":
        return lambda: torch.nn.utils.clip_grad_norm_(made, 1.0)
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(made, fused=True),
        # DTensor has no fused SGD.
        "sgd": lambda: torch.optim.SGD(made, momentum=0.9, foreach=True),
        "muon": lambda: torch.optim.Muon(made),
    }[name]()
    return optimizer.step


def microseconds(step, min_time):
    for _ in range(3):
        step()
    timer = Timer("step()", globals={"step": step})
    # The quickest block: other work on the machine only ever adds.
    return min(timer.blocked_autorange(min_run_time=min_time).times) * 1e6


def peer(cases, min_time):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    times = {}
    for name, size in cases:
        for kind, on in (("distributed", mesh), ("plain", None)):
            try:
                times[name, size, kind] = microseconds(step_of(name, parameters(size, on)), min_time)
            except (NotImplementedError, RuntimeError) as error:
                print(f"{name} {kind}: PyTorch refuses: {str(error).splitlines()[0][:100]}")
    dist.destroy_process_group()
    return times


def tessera(program, min_time):
    text = subprocess.run(
        [program, "--benchmark_format=csv", f"--benchmark_min_time={min_time}",
         "--benchmark_repetitions=3"], check=True, capture_output=True, text=True).stdout
    times = {}
    for row in csv.reader(io.StringIO(text)):
        # Each repetition has a row, and so have their mean and spread.
        if len(row) > 3 and "/" in row[0] and "_" not in row[0]:
            times[row[0]] = min(times.get(row[0], float("inf")), float(row[3]) / 1000)
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="build/bin/bench_optimizer")
    parser.add_argument("--min-time", type=float, default=0.2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours = tessera(options.program, options.min_time)
    cases = [(name.split("/")[0], int(name.split("/")[1].split("x")[0])) for name in ours
             if not name.endswith("/flat")]
    theirs = peer(cases, options.min_time)
    print(f"{'microseconds, 50 parameters':30}{'Tessera':>10}{'flat':>10}{'DTensor':>10}{'plain':>10}"
          f"{'ratio':>8}")
    for name, size in cases:
        key = f"{name}/{size}x{size}"
        own, flat = ours[key], ours.get(key + "/flat")
        dtensor, plain = (theirs.get((name, size, kind)) for kind in ("distributed", "plain"))
        figures = [own, flat, dtensor, plain]
        best = min(x for x in (own, flat) if x is not None)
        ratio = f"{dtensor / best:8.1f}" if dtensor else ""
        print(f"{key:30}" + "".join(f"{x:10.0f}" if x else f"{'':10}" for x in figures) + ratio)


if __name__ == "__main__":
    main()
