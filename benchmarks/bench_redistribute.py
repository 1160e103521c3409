"""What a redistribution moves: Tessera's planner beside PyTorch's DTensor, in one run.

  bench_redistribute.py [--doc docs/redistribution.md] [--write]

Every pair of placements on a mesh of 4 and on 2 x 2, sizes that divide and sizes that don't: the
table of docs/redistribution.md, of which core_test writes and checks Tessera's columns and --write
writes PyTorch's. For PyTorch the tensors that its collectives are called with are measured, on 4
Gloo processes; a change of the sharded dimension counts as the all-to-all that it is on CUDA (on a
CPU mesh PyTorch gathers). Both are what one rank sends at most: (p-1) L in an all-gather of L bytes
each, L less the part that stays in a reduce-scatter or all-to-all, twice that in an all-reduce.
Fails if Tessera moves more anywhere.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 4


class Sent(TorchDispatchMode):
    """Calls, bytes that this rank sends, and bytes that it puts into each kind of collective."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.paused = 0, 0, False
        self.inputs = collections.Counter()

    def count(self, kind, tensor, parts):
        if self.paused:
            return
        others = tensor.numel() - tensor.numel() // parts
        elements = {"all_gather": tensor.numel() * (parts - 1), "all_reduce": 2 * others}
        self.calls += 1
        self.bytes += elements.get(kind, others) * tensor.element_size()
        self.inputs[kind] += tensor.numel() * tensor.element_size()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does on its local tensors comes here
        name = op.name()
        if name.startswith("_c10d_functional::all_gather_into_tensor"):
            self.count("all_gather", args[0], args[1])
        elif name.startswith("_c10d_functional::reduce_scatter_tensor"):
            self.count("reduce_scatter", args[0], args[2])
        elif name.startswith("_c10d_functional::all_reduce"):
            group = torch.distributed.distributed_c10d._resolve_process_group(args[2])
            self.count("all_reduce", args[0], group.size())
        elif name.startswith("_c10d_functional::") and "_tensor" not in name:
            raise RuntimeError(f"a collective that nobody counts: {name}")
        return op(*args, **(kwargs or {}))


def count_exchanges(sent):
    """A change of the sharded dimension is one all-to-all of what it is called with."""
    exchange = placement_types.shard_dim_alltoall

    def counted(tensor, gather_dim, shard_dim, mesh, mesh_dim):
        sent.count("all_to_all", tensor, mesh.size(mesh_dim))
        sent.paused = True
        try:
            return exchange(tensor, gather_dim, shard_dim, mesh, mesh_dim)
        finally:
            sent.paused = False

    placement_types.shard_dim_alltoall = counted
    return exchange


def placements(text):
    names = {"Shard": Shard, "Replicate": Replicate, "Partial": lambda: Partial("sum"),
             "_StridedShard": lambda dim, sf: _StridedShard(dim, split_factor=sf)}
    return eval(text.replace("Partial(sum)", "Partial()"), names)


def one(mesh, sizes, source, target):
    """(calls, bytes) of one transition, or None where PyTorch refuses."""
    whole = torch.zeros(sizes)
    try:
        tensor = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        pending = [isinstance(p, Partial) for p in source]
        tensor = tensor.redistribute(mesh, [Replicate() if p else q
                                            for p, q in zip(pending, source)])
        tensor = DTensor.from_local(tensor.to_local(), mesh, source, run_check=False,
                                    shape=whole.shape, stride=whole.stride())
        sent = Sent()
        exchange = count_exchanges(sent)
        try:
            with sent:
                tensor.redistribute(mesh, target).to_local()
        finally:
            placement_types.shard_dim_alltoall = exchange
        return sent.calls, sent.bytes
    except (RuntimeError, NotImplementedError, AssertionError, ValueError):
        return None


def work(rank, port, cases, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    meshes, found = {}, []
    for mesh_sizes, sizes, source, target in cases:
        if mesh_sizes not in meshes:
            names = tuple(f"d{i}" for i in range(len(mesh_sizes)))
            meshes[mesh_sizes] = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=names)
            if len(mesh_sizes) > 1:
                meshes[mesh_sizes]._flatten("all")  # so that PyTorch may merge its collectives
        found.append(one(meshes[mesh_sizes], sizes, placements(source), placements(target)))
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, found)
    if rank == 0:
        most = [None if None in each else [max(n) for n in zip(*each)] for each in zip(*everyone)]
        with open(path, "w") as file:
            json.dump(most, file)
    dist.destroy_process_group()


def on_ranks(work, *arguments):
    """What work(rank, port, *arguments, path) writes to the path, as JSON, on rank 0 of RANKS."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile("r") as file:
        processes.spawn(work, (port, *arguments, file.name), nprocs=RANKS)
        return json.load(file)


def numbers(text):
    return tuple(map(int, re.findall(r"\d+", text)))


def read(lines):
    """(line and column, case, calls and bytes) of Tessera's cells."""
    for number, line in enumerate(lines):
        cells = [cell.strip(" `*") for cell in line.split("|")]
        if line.startswith("| mesh |"):
            columns = {i: numbers(cell) for i, cell in enumerate(cells) if cell.endswith("Tessera")}
        elif line.startswith(("| 4 |", "| 2 × 2 |")):
            for column, sizes in columns.items():
                size, calls = numbers(cells[column])
                yield (number, column), (numbers(cells[1]), sizes, cells[2], cells[3]), (calls, size)


def write(lines, places, theirs):
    """PyTorch's cells, each behind Tessera's."""
    for (number, column), other in zip(places, theirs):
        cells = lines[number].split("|")
        cells[column + 1] = " refused " if other is None else f" {other[1]} in {other[0]} "
        lines[number] = "|".join(cells)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--doc", type=pathlib.Path, default="docs/redistribution.md")
    parser.add_argument("--write", action="store_true", help="PyTorch's columns into the table")
    options = parser.parse_args()
    lines = options.doc.read_text().splitlines()
    places, cases, ours = zip(*read(lines))
    theirs = on_ranks(work, cases)
    both = [(own[1], other[1]) for own, other in zip(ours, theirs) if other is not None]
    more = sum(own > other for own, other in both)
    print(f"{len(cases)} transitions: fewer bytes than PyTorch in {sum(a < b for a, b in both)}, "
          f"as many in {sum(a == b for a, b in both)}, more in {more}; "
          f"PyTorch refuses {theirs.count(None)}")
    print(f"all of them together: {sum(a for a, _ in both)} bytes, PyTorch {sum(b for _, b in both)}")
    if options.write:
        write(lines, places, theirs)
        options.doc.write_text("\n".join(lines) + "\n")
    sys.exit(more > 0)


if __name__ == "__main__":
    main()
