"""What a distributed tensor adds to an operator: Tessera's beside PyTorch's DTensor, in one run.

  bench_dispatch.py [--program build/bin/bench_dispatch] [--min-time 0.1]

Both measure the same operators on the same small tensors on one rank: the time on a distributed
tensor less the time on a plain one. PyTorch's is measured with torch.utils.benchmark here.
"""

import argparse
import csv
import io
import os
import subprocess

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.benchmark import Timer


# So many of an operator's last inputs are replicated, as weights are; the others are Shard(0).
WEIGHTS = {"mm": 1, "addmm": 1, "embedding": 1}


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
        "foreach_add_200": (many + many, lambda t: torch._foreach_add_(t[:200], t[200:])),
        "detach": ([x], lambda t: t[0].detach()),
    }


def microseconds(run, inputs, min_time):
    run(inputs)
    timer = Timer("run(inputs)", globals={"run": run, "inputs": inputs})
    # The quickest block: other work on the machine only ever adds.
    return min(timer.blocked_autorange(min_run_time=min_time).times) * 1e6


def peer(min_time):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    added = {}
    with torch.no_grad():
        for name, (inputs, run) in cases().items():
            split = len(inputs) - WEIGHTS.get(name, 0)
            ours = [distribute_tensor(x.clone(), mesh, [Shard(0) if i < split else Replicate()])
                    for i, x in enumerate(inputs)]
            try:
                added[name] = microseconds(run, ours, min_time) - microseconds(
                    run, [x.clone() for x in inputs], min_time)
            except (NotImplementedError, RuntimeError) as error:
                added[name] = None
                print(f"{name}: PyTorch refuses: {str(error).splitlines()[0][:100]}")
    dist.destroy_process_group()
    return added


def tessera(program, min_time):
    text = subprocess.run([program, "--benchmark_format=csv", f"--benchmark_min_time={min_time}"],
                          check=True, capture_output=True, text=True).stdout
    times = {row[0]: float(row[3]) / 1000 for row in csv.reader(io.StringIO(text))
             if len(row) > 3 and row[0].endswith(("/plain", "/distributed"))}
    return {name[:-len("/plain")]: times[name.replace("/plain", "/distributed")] - time
            for name, time in times.items() if name.endswith("/plain")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="build/bin/bench_dispatch")
    parser.add_argument("--min-time", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = tessera(options.program, options.min_time), peer(options.min_time)
    print(f"{'added, microseconds':24}{'Tessera':>10}{'PyTorch':>10}{'ratio':>8}")
    for name, added in ours.items():
        other = theirs.get(name)
        if other is None:
            print(f"{name:24}{added:10.2f}")
        else:
            print(f"{name:24}{added:10.2f}{other:10.2f}{other / max(added, 1e-3):8.0f}")


if __name__ == "__main__":
    main()
