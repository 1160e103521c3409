#!/usr/bin/env python3
"""Measures the highest speeds that PyTorch reaches on this GPU: copies, matrix products, attention. Prints one JSON
object per line."""
import argparse
import json

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def seconds_of(call, repetitions):
    """Returns the shortest time of several repetitions, by the device's own clock."""
    call()
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    # The fake CUDA takes no time, so the result is at least 1 ns.
    return max(min(times), 1e-9)


def report(what, amount, unit, seconds):
    print(json.dumps({"what": what, "value": amount / seconds, "unit": unit}), flush=True)


def copies(options):
    source = torch.empty(options.bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    report("copy", 2 * options.bytes / 1e12, "TB/s", seconds_of(lambda: target.copy_(source), options.repetitions))


def products(options):
    for rows, columns, inner in options.products:
        a = torch.empty(rows, inner, dtype=torch.bfloat16, device="cuda").normal_()
        b = torch.empty(inner, columns, dtype=torch.bfloat16, device="cuda").normal_()
        report(f"bf16 product {rows}x{columns}x{inner}", 2 * rows * columns * inner / 1e12, "TFLOP/s",
               seconds_of(lambda: a @ b, options.repetitions))


def attention(options):
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for width in options.widths:
        shape = (options.batch, 32, options.tokens, width)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(3))
        for name, backend in backends.items():
            try:
                with sdpa_kernel(backend):
                    seconds = seconds_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                                         options.repetitions)
            except RuntimeError:
                continue
            work = 2 * options.batch * 32 * options.tokens**2 * width / 1e12
            report(f"causal attention, {name}, head width {width}", work, "TFLOP/s", seconds)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="for a rehearsal on the fake CUDA")
    options = parser.parse_args()
    options.repetitions = 3 if options.small else 20
    options.bytes = 1 << 20 if options.small else 4 << 30
    options.batch, options.tokens = (1, 128) if options.small else (4, 4096)
    options.widths = (64,) if options.small else (64, 128)
    # A cubic product, and the products in the blocks and the head of the 1B model.
    shapes = [(8192, 8192, 8192), (32768, 8192, 2048), (32768, 2048, 8192), (32768, 2048, 2048), (4096, 128256, 2048)]
    options.products = [(128, 128, 128)] if options.small else shapes
    return options


def main():
    options = parse()
    for measure in (copies, products, attention):
        measure(options)


if __name__ == "__main__":
    main()
