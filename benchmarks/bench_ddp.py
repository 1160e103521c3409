#!/usr/bin/env python3
"""Measures the step time of data parallelism: fsdp::replicate in C++ and Python's DistributedDataParallel, in one run.
  benchmarks/bench_ddp.py [--width 1024 --layers 3 --batch 64 --ranks 2 --steps 30 --rounds 5] [--out FILE.json]
Both programs train the same MLP from the same weights on the same rows, in fp32 on CPUs with one thread per rank, with
fused AdamW. Each rank has a batch of --batch rows. malloc keeps freed memory on both sides (keep_freed_memory() in
C++, glibc's variables in Python), and DDP's gradients are views of its buckets, so that DDP copies less. In each round
each side runs once: DDP on Gloo, Tessera on Gloo (TESSERA_SHM=0), and Tessera on shared memory, its default on one
host. A side's time in a round is the median of its steps without the first ones. The ratios are computed within each
round, so that changes of the machine's speed affect both sides. The losses of all sides must agree.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import time

WARM_UP = 5
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}
SIDES = {"ddp": KEEP_FREED_MEMORY, "gloo": {"TESSERA_SHM": "0"}, "shm": {"TESSERA_SHM": "1"}}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 1024), ("layers", 3), ("batch", 64), ("ranks", 2), ("steps", 30), ("rounds", 5)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--out", type=pathlib.Path, help="writes the raw results of each round")
    parser.add_argument("--peer", action="store_true", help="runs one rank of DDP, under torchrun")
    return parser.parse_args()


def peer(args):
    """Trains in Python what the program bench_ddp.cpp trains."""
    import torch
    import torch.distributed as dist

    def waves(sizes, phase):
        return torch.sin(torch.arange(sizes[0] * sizes[1], dtype=torch.float32).mul(0.7).add(phase)).view(sizes)

    layers = []
    for i in range(args.layers):
        layer = torch.nn.Linear(args.width, args.width)
        with torch.no_grad():
            layer.weight.copy_(waves((args.width, args.width), float(i)).mul(0.05))
            layer.bias.zero_()
        layers += [torch.nn.ReLU(), layer]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1, fused=True)
    x = waves((args.batch, args.width), 100.0 + rank)
    target = waves((args.batch, args.width), 200.0 + rank)
    for _ in range(args.steps):
        begun = time.perf_counter()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begun
        if rank == 0:
            print(json.dumps({"step_time_s": seconds, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


def measure(side, args):
    """Returns the median step time in seconds, and the losses of all steps."""
    if side == "ddp":
        flags = [f"--{name}={getattr(args, name)}" for name in ("width", "layers", "batch", "steps")]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", args.ranks,
                   __file__, "--peer", *flags]
    else:
        command = [programs.BIN / "tessera-run", "--nproc", args.ranks, "--", programs.BIN / "bench_ddp",
                   args.width, args.layers, args.batch, args.steps]
    done = programs.succeed(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | SIDES[side])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return statistics.median(row["step_time_s"] for row in rows[WARM_UP:]), [row["loss"] for row in rows]


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(args):
    rounds = []
    for i in range(args.rounds):
        times, losses = {}, {}
        for side in SIDES if i % 2 == 0 else reversed(SIDES):
            times[side], losses[side] = measure(side, args)
        differences = [abs(a - b) / b for side in ("gloo", "shm") for a, b in zip(losses[side], losses["ddp"], strict=True)]
        if max(differences) > 1e-4:
            raise SystemExit(f"the losses differ by {max(differences):.1e}: {losses}")
        rounds.append({f"{side}_s": seconds for side, seconds in times.items()}
                      | {"loss": losses["ddp"][-1], "largest_relative_difference_of_losses": max(differences)})
        print(f"round {i + 1}: " + ", ".join(f"{side} {seconds * 1e3:.2f} ms" for side, seconds in times.items()), flush=True)
    for side in ("gloo", "shm"):
        print(f"DDP's time / Tessera's time on {side}: {spread([row['ddp_s'] / row[f'{side}_s'] for row in rounds])}")
    if args.out:
        results.write(args.out, {"rounds": rounds})


if __name__ == "__main__":
    arguments = parse()
    if arguments.peer:
        peer(arguments)
    else:
        import results
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "examples"))
        import programs
        main(arguments)
