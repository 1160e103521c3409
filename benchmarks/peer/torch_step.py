#!/usr/bin/env python3
"""A training step like llama_train's in PyTorch: the same model, FSDP2 with fp32 shards and bf16 computation (fp32
on a CPU), fused AdamW, gradient clipping. Writes one JSON object per step."""
import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_llama


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ac", default="none", choices=["none", "full"])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true", help="each layer by torch.compile")
    return parser.parse_args()


def sharded_model(config, device, dtype, compiles, recomputes):
    """Creates the model as llama_train on one rank does: one FSDP unit per layer, resharded after forward."""
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    with torch.device(device):
        model = torch_llama.Llama(config)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for i, layer in enumerate(model.model.layers):
        if recomputes:
            model.model.layers[i] = layer = checkpoint_wrapper(layer)
        if compiles:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def main():
    options = parse()
    config = torch_llama.read_config(options.config)
    on_gpu = options.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = sharded_model(config, options.device, dtype, options.compile, options.ac == "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    cos, sin = (table.to(options.device, dtype) for table in torch_llama.rope_tables(config, options.seq))
    tokens = torch.randint(config["vocab_size"], (options.batch, options.seq + 1), device=options.device)

    def step():
        logits = model(tokens[:, :-1], cos, sin)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for i in range(options.warm + options.steps):
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if i >= options.warm:
            print(json.dumps({"step_time_s": seconds, "tokens_per_s": tokens[:, 1:].numel() / seconds,
                              "peak_memory_bytes": torch.cuda.max_memory_reserved() if on_gpu else None}), flush=True)
    dist.destroy_process_group()
    # Exits without interpreter shutdown: autograd's thread may still release FSDP's callback of the last step, for
    # which it takes the GIL. If the interpreter is shutting down, that aborts the process (PyTorch 2.11).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
