"""The library's own operators, torch.ops.tessera.silu_mul and so on, on plain and distributed tensors."""
import functools
import multiprocessing
import os
import sys
import traceback

import torch
from torch.nn.functional import silu

import ranks
from run import LIBRARY

RANKS = 2


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def loss_of_rows(ops, logits, targets):
    return ops.cross_entropy(logits, targets, label_smoothing=0.1)[0]


def losses_by_torch(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)


def cases(ops):
    """(operator, what it is, inputs, their placements, how many have a gradient)"""
    def dropped(x):
        return ops.dropout(x, 0.5, 1, 2)

    rows, heads = torch.randn(5, 6), torch.randn(3, 5, 4, 8)
    table = torch.randn(5, 8)
    return [
        (ops.silu_mul, lambda gate, up: silu(gate) * up, (rows, rows.flip(0)), ("S(0)", "S(0)"), 2),
        (ops.silu_mul, lambda gate, up: silu(gate) * up, (rows, rows.flip(0)), ("S(1)", "R"), 2),
        (lambda x, weight: ops.rms_norm(x, weight, 1e-5)[0],
         lambda x, weight: torch.nn.functional.rms_norm(x, [6], weight, 1e-5),
         (rows, torch.randn(6)), ("S(0)", "R"), 2),
        (lambda x, residual, weight: torch.cat(ops.add_rms_norm(x, residual, weight, 1e-5)[:2], 1),
         lambda x, residual, weight: torch.cat(
             [torch.nn.functional.rms_norm(x + residual, [6], weight, 1e-5), x + residual], 1),
         (rows, rows.flip(0), torch.randn(6)), ("S(0)", "S(0)", "R"), 3),
        (lambda q, k: ops.attention(q, k, k, causal=True),
         lambda q, k: torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True),
         (heads.transpose(1, 2), heads[:, :, :2].transpose(1, 2)), ("S(1)", "S(1)"), 2),
        (dropped, dropped, (rows,), ("S(1)",), 1),
        (ops.embedding, lambda weight, indices: weight[indices], (rows, torch.tensor([4, 0, 4])), ("S(0)", "R"), 1),
        (ops.embedding, lambda weight, indices: weight[indices], (rows, torch.tensor([4, 0, 4])), ("R", "S(0)"), 1),
        *[(functools.partial(loss_of_rows, ops), losses_by_torch, (5 * rows, torch.tensor([4, 0, -100, 5, 5])),
           placements, 1)
          for placements in (("S(1)", "R"), ("S(0)", "S(0)"), ("S(0)", "R"), ("R", "R"))],
        (ops.rotary_embedding, rotated, (heads, table, table + 1), ("S(2)", "R", "R"), 1),
        (lambda *x: torch.cat(ops.rotary_embedding_qk(*x), 2),
         lambda q, k, *tables: torch.cat([rotated(q, *tables), rotated(k, *tables)], 2),
         (heads, heads[:, :, :2], table, table + 1), ("S(0)", "S(0)", "R", "R"), 2),
    ]


def outcome(function, inputs, gradients):
    """The result, and the gradients of the first inputs for a gradient of ones."""
    leaves = [x.detach().requires_grad_(i < gradients) for i, x in enumerate(inputs)]
    result = function(*leaves)
    result.sum().backward()
    return [result.detach(), *(x.grad for x in leaves[:gradients])]


def check(ops):
    mesh = ops.init_device_mesh("cpu", [RANKS], ["x"])
    torch.manual_seed(1)
    for function, reference, inputs, placements, gradients in cases(ops):
        expected = outcome(reference, inputs, gradients)
        distributed = [ops.distribute_tensor(x, mesh, [p]) for x, p in zip(inputs, placements)]
        for given in (inputs, distributed):
            for found, wanted in zip(outcome(function, given, gradients), expected):
                found = ops.full_tensor(found) if ops.is_distributed(found) else found
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def main(rank, port, channel):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TESSERA_TIMEOUT="15")
    try:
        check(torch.ops.tessera)
        channel.send("")
    except Exception:
        channel.send(traceback.format_exc())


def run():
    """The errors of all ranks."""
    torch.set_num_threads(1)
    torch.ops.load_library(str(LIBRARY))
    context, port, errors, processes = multiprocessing.get_context("fork"), ranks.free_port(), [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        processes.append((context.Process(target=main, args=(rank, port, theirs)), ours))
        processes[-1][0].start()
    for process, channel in processes:
        errors.append(channel.recv() if channel.poll(60) else "no answer")
        process.kill()
        process.join()
    return "\n".join(filter(None, errors))


if __name__ == "__main__":
    sys.exit(run() or 0)
