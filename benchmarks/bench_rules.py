"""What operators communicate: the table of docs/sharding_rules.md beside PyTorch's DTensor.

  bench_rules.py [--doc docs/sharding_rules.md] [--all]

Runs the rows on a mesh of 4 in PyTorch, on 4 Gloo processes, forward and backward, and measures the
tensors that its collectives are called with (a change of the sharded dimension as the all-to-all that
it is on CUDA). Where PyTorch leaves a reduction pending that the row has done, reducing it counts
too. Bytes are what one rank sends, as in bench_redistribute.py. Fails if a row sends more than
PyTorch's; rows that PyTorch refuses or gets wrong are shown.
"""

import argparse
import json
import re
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import bench_redistribute as redistribution
from bench_redistribute import RANKS, Sent, on_ranks

OPERATIONS = {
    "silu": lambda t: F.silu(t[0]),
    "neg": lambda t: -t[0],
    "add": lambda t: t[0] + t[1],
    "add, broadcast": lambda t: t[0] + t[1],
    "mul": lambda t: t[0] * t[1],
    "div": lambda t: t[0] / t[1],
    "pow": lambda t: t[0].pow(2),
    "gelu": lambda t: F.gelu(t[0]),
    "clamp": lambda t: t[0].clamp(-0.5, 0.5),
    "add_ in place": lambda t: t[0].clone().add_(t[1]),
    "mul_ in place": lambda t: t[0].clone().mul_(t[1]),
    "relu": lambda t: F.relu(t[0]),
    "where": lambda t: torch.where(t[0], t[1], t[2]),
    "masked_fill": lambda t: t[0].masked_fill(t[1], 0.0),
    "copy_": lambda t: t[0].clone().copy_(t[1]),
    "fill_": lambda t: t[0].clone().fill_(3),
    "mm": lambda t: t[0] @ t[1],
    "bmm": lambda t: torch.bmm(t[0], t[1]),
    "addmm": lambda t: torch.addmm(t[0], t[1], t[2]),
    "baddbmm": lambda t: torch.baddbmm(t[0], t[1], t[2]),
    "linear, 3-D input": lambda t: F.linear(t[0], t[1], t[2]),
    "linear without bias": lambda t: F.linear(t[0], t[1]),
    "matmul, 4-D": lambda t: torch.matmul(t[0], t[1]),
    "mv": lambda t: torch.mv(t[0], t[1]),
    "dot": lambda t: torch.dot(t[0], t[1]),
    "outer": lambda t: torch.outer(t[0], t[1]),
    "einsum bsi,io->bso": lambda t: torch.einsum("bsi,io->bso", t[0], t[1]),
    "sum": lambda t: t[0].sum(),
    "sum(0)": lambda t: t[0].sum(0),
    "mean": lambda t: t[0].mean(),
    "mean(-1)": lambda t: t[0].mean(-1),
    "amax(0)": lambda t: t[0].amax(0),
    "max": lambda t: t[0].max(),
    "max.dim(0)": lambda t: t[0].max(0),
    "min.dim(-1)": lambda t: t[0].min(-1, True),
    "argmax(0)": lambda t: t[0].argmax(0),
    "argmax": lambda t: t[0].argmax(),
    "aminmax(0)": lambda t: torch.aminmax(t[0], dim=0),
    "var(0)": lambda t: t[0].var(0),
    "std": lambda t: t[0].std(),
    "var_mean(0)": lambda t: torch.var_mean(t[0], 0),
    "logsumexp(0)": lambda t: t[0].logsumexp(0),
    "norm": lambda t: t[0].norm(),
    "vector_norm(2, -1)": lambda t: torch.linalg.vector_norm(t[0], 2, -1),
    "vector_norm(1)": lambda t: torch.linalg.vector_norm(t[0], 1),
    "vector_norm(3, 0)": lambda t: torch.linalg.vector_norm(t[0], 3, 0),
    "_foreach_norm": lambda t: torch._foreach_norm(t, 2),
    "sort(-1)": lambda t: t[0].sort(-1),
    "topk(2, -1)": lambda t: t[0].topk(2, -1),
    "cumsum(-1)": lambda t: t[0].cumsum(-1),
    "softmax(-1)": lambda t: F.softmax(t[0], -1),
    "log_softmax(-1)": lambda t: F.log_softmax(t[0], -1),
    "layer_norm": lambda t: F.layer_norm(t[0], (6,), t[1], t[2]),
    "rms_norm": lambda t: F.rms_norm(t[0], (6,), t[1], 1e-5),
    "group_norm": lambda t: F.group_norm(t[0], 2, t[1], t[2]),
    "batch_norm in training": lambda t: F.batch_norm(t[0], None, None, t[1], t[2], True),
    "view: flatten": lambda t: t[0].view(32, 6),
    "view: unflatten": lambda t: t[0].view(8, 4, 3),
    "flatten": lambda t: t[0].flatten(),
    "slice of a split dimension": lambda t: t[0][1:5],
    "cat": lambda t: torch.cat([t[0], t[1]], 1),
    "gather(1)": lambda t: t[0].gather(1, t[1]),
    "scatter(1)": lambda t: t[0].scatter(1, t[1], t[2]),
    "scatter_add(1)": lambda t: t[0].scatter_add(1, t[1], t[2]),
    "index_select(1)": lambda t: t[0].index_select(1, t[1]),
    "index_add(1)": lambda t: t[0].index_add(1, t[1], t[2]),
    "x[:, i]": lambda t: t[0][:, t[1]],
    "x[i]": lambda t: t[0][t[1]],
    "embedding": lambda t: F.embedding(t[1], t[0]),
    "cross_entropy": lambda t: F.cross_entropy(t[0], t[1]),
    "cross_entropy, ignore_index": lambda t: F.cross_entropy(t[0], t[1], ignore_index=1),
    "cross_entropy, weights": lambda t: F.cross_entropy(t[0], t[1], t[2].detach()),
    "cross_entropy, sum": lambda t: F.cross_entropy(t[0], t[1], reduction="sum"),
    "nll_loss": lambda t: F.nll_loss(t[0], t[1]),
    "mse_loss": lambda t: F.mse_loss(t[0], t[1]),
    "conv2d": lambda t: F.conv2d(t[0], t[1], t[2]),
    "conv1d": lambda t: F.conv1d(t[0], t[1]),
}


def sent(inputs):
    """Bytes that one of 4 ranks sends that puts so many into each kind of collective."""
    share = (RANKS - 1) / RANKS
    factors = {"all_gather": RANKS - 1, "all_reduce": 2 * share}
    return sum(factors.get(kind, share) * size for kind, size in inputs)


def sent_by_row(text):
    """What is sent, from text such as "2 all_reduce 64, all_gather 8"."""
    return sent((kind, int(size)) for kind, size in re.findall(r"([a-z_]+) (\d+)", text))


def rows(path):
    """(operation, sizes, placements, results, bytes forward and backward) of the 1-D mesh."""
    name = sizes = None
    for line in open(path):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 7 or cells[0] in ("operator", "---"):
            continue
        if cells[0]:
            name, sizes = cells[0].strip("`"), cells[1]
        if "," not in cells[2]:
            yield (name, sizes, cells[2], cells[3],
                   sent_by_row(cells[4]), sent_by_row(cells[6]))


def placement(text):
    if text == "R":
        return Replicate()
    return Partial() if text == "P" else Shard(int(text[1:]))


def operands(sizes, lies, mesh):
    """Distributed, and the plain tensors that they are."""
    result, plain = [], []
    torch.manual_seed(0)
    for (kind, size), lie in zip(re.findall(r"(\w*)\(([\d, ]*)\)", sizes), lies.split()):
        shape = [int(n) for n in size.split(",") if n.strip()]
        if kind == "index":
            value = torch.arange(torch.Size(shape).numel()).remainder(2).view(shape)
        else:
            value = torch.rand(shape, dtype=torch.double) + 0.5
            value = value > 1 if kind == "mask" else value
        for tensor, tensors in ((distribute_tensor(value, mesh, [placement(lie)]), result),
                                (value.clone(), plain)):
            tensors.append(tensor.requires_grad_() if value.is_floating_point() else tensor)
    return result, plain


def list_of(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def gradient_like(tensor):
    lies = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return distribute_tensor(torch.ones(tensor.shape, dtype=tensor.dtype), tensor.device_mesh, lies)


def same(result, value):
    if result is None or value is None:
        return result is value
    whole = result.full_tensor() if isinstance(result, DTensor) else result
    return torch.allclose(whole, value)


def measured(row, mesh):
    """Bytes forward and backward, or the reason why there are none."""
    name, sizes, lies, listed = row[:4]
    forward, backward = Sent(), Sent()
    exchange = redistribution.count_exchanges(forward)
    try:
        inputs, plain = operands(sizes, lies, mesh)
        views = [x.view_as(x) for x in inputs]
        with forward:
            results = list_of(OPERATIONS[name](views))
            for result, own in zip(results, listed.split()):
                if isinstance(result, DTensor) and result.placements[0].is_partial() and own[0] != "P":
                    result.redistribute(mesh, [Replicate()])
        redistribution.placement_types.shard_dim_alltoall = exchange
        redistribution.count_exchanges(backward)
        expected = list_of(OPERATIONS[name](plain))
        roots = [r for r in results if r.requires_grad]
        leaves = [v for v in views if v.requires_grad]
        if roots and leaves:
            seeds = [gradient_like(r) for r in roots]
            with backward:
                results += torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
            roots = [e for e in expected if e.requires_grad]
            expected += torch.autograd.grad(roots, [x for x in plain if x.requires_grad],
                                            [torch.ones_like(r) for r in roots], allow_unused=True)
        if not all(same(result, value) for result, value in zip(results, expected)):
            return "wrong values"
        return [sent(forward.inputs.items()), sent(backward.inputs.items())]
    except Exception as error:  # whatever PyTorch raises is its answer
        return (str(error) or repr(error)).splitlines()[0][:80]
    finally:
        redistribution.placement_types.shard_dim_alltoall = exchange


def work(rank, port, all_rows, path):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    found = [measured(row, mesh) for row in all_rows]
    if rank == 0:
        with open(path, "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--doc", default="docs/sharding_rules.md")
    parser.add_argument("--all", action="store_true", help="also rows where both send the same")
    options = parser.parse_args()
    all_rows = [row for row in rows(options.doc) if row[0] in OPERATIONS]
    theirs = on_ranks(work, all_rows)
    more = fewer = refused = 0
    print(f"{'operator':32}{'inputs':16}{'Tessera':>16}{'PyTorch':>16}")
    for (name, _, lies, _, forward, backward), other in zip(all_rows, theirs):
        if isinstance(other, str):
            refused += 1
            beside = f"  {other}"
        else:
            more += forward + backward > sum(other)
            fewer += forward + backward < sum(other)
            beside = f"{f'{other[0]:.0f} + {other[1]:.0f}':>16}"
        if options.all or isinstance(other, str) or [forward, backward] != other:
            print(f"{name:32}{lies:16}{f'{forward:.0f} + {backward:.0f}':>16}{beside}")
    print(f"{len(all_rows)} rows: fewer bytes than PyTorch in {fewer}, more in {more}, "
          f"refused by PyTorch or wrong there {refused}")
    sys.exit(more > 0)


if __name__ == "__main__":
    main()
