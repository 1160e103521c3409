#!/usr/bin/env python3
"""Measures collectives between the ranks that torchrun started. Rank 0 prints one JSON object per line.

Sizes and bandwidths are those of nccl-tests (its doc/PERFORMANCE.md): the size is that of the larger of the input and
output, the algorithm bandwidth is size / time, and the bus bandwidth of n ranks is 2(n-1)/n of the algorithm bandwidth for
all_reduce, (n-1)/n for the others."""
import argparse
import json
import os

import torch
import torch.distributed as dist

CHECKED = 1 << 20  # elements of each block of an output whose values are checked


def seconds_of(call, repetitions):
    """Returns the mean time of calls in a row, by the device's own clock."""
    for _ in range(2):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    start.record()
    for _ in range(repetitions):
        call()
    end.record()
    torch.cuda.synchronize()
    # The fake CUDA takes no time, so the result is at least 1 ns.
    return max(start.elapsed_time(end) / 1e3 / repetitions, 1e-9)


def collectives(elements):
    """Returns for each collective its call, its output, the values of the output's blocks, and the factor between bus and
    algorithm bandwidth. Each input has the value rank + 1."""
    ranks, mine = dist.get_world_size(), float(dist.get_rank() + 1)

    def tensor(count, value=mine):
        return torch.full((count,), value).cuda()  # filled on the CPU, because the fake CUDA fills no tensors

    whole, part = tensor(elements), tensor(elements // ranks)
    output, sums, in_place = tensor(elements, 0.0), tensor(elements // ranks, 0.0), tensor(elements)
    of_ranks, total, share = [rank + 1.0 for rank in range(ranks)], [ranks * (ranks + 1) / 2], (ranks - 1) / ranks
    return {"all_gather": (lambda: dist.all_gather_into_tensor(output, part), output, of_ranks, share),
            "all_to_all": (lambda: dist.all_to_all_single(output, whole), output, of_ranks, share),
            "reduce_scatter": (lambda: dist.reduce_scatter_tensor(sums, whole), sums, total, share),
            "all_reduce": (lambda: dist.all_reduce(in_place), in_place, total, 2 * share)}


def measure(size, repetitions):
    ranks = dist.get_world_size()
    elements = size // 4 // ranks * ranks
    for name, (call, output, values, factor) in collectives(elements).items():
        what = f"{name}, {size >> 10} KiB, {ranks} ranks"
        call()
        blocks = output.view(len(values), -1)[:, :CHECKED].cpu()
        if not torch.equal(blocks, torch.tensor(values)[:, None].expand_as(blocks)):
            raise SystemExit(f"{what}: wrong values on rank {dist.get_rank()}")
        seconds = seconds_of(call, repetitions)
        bandwidth = elements * 4 / seconds / 1e9
        for value, unit in ((seconds * 1e6, "us"), (bandwidth, "GB/s, algorithm"), (bandwidth * factor, "GB/s, bus")):
            if dist.get_rank() == 0:
                print(json.dumps({"what": what, "value": value, "unit": unit}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="for a rehearsal on the fake CUDA")
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(options.backend)
    for size in [64 << 10] if options.small else [64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30]:
        measure(size, 2 if options.small else 20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
