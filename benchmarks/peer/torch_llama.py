#!/usr/bin/env python3
"""A Llama training run in PyTorch, for comparison with llama_train.
Run by itself, it is plain PyTorch on one process. Under torchrun, the same model is split with DTensor
(tensor, sequence and loss parallelism) and FSDP2. It reads llama_train's inputs (a Hugging Face
folder, an llm.c token shard), takes the same samples, and writes one JSON object per step.
  torch_llama.py make --config config.json --seed 0 --out DIR
  torch_llama.py train --model DIR --tokens T.bin --steps 20 --metrics out.jsonl
  torchrun --nproc-per-node 4 torch_llama.py train ... --dp 2 --tp 2
"""
import argparse
import contextlib
import json
import os
import pathlib
import struct
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file


def read_config(path):
    """Reads the configuration from a Hugging Face folder, or from a config.json with any name."""
    path = pathlib.Path(path)
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def apply_rope(x, cos, sin):
    """Applies rotary embedding to x, (batch, sequence, heads, head_dim), pairing the two halves of each head."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c["head_dim"]
        q, kv = c["num_attention_heads"] * self.head_dim, c["num_key_value_heads"] * self.head_dim
        self.q_proj = nn.Linear(c["hidden_size"], q, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], kv, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], kv, bias=False)
        self.o_proj = nn.Linear(q, c["hidden_size"], bias=False)

    def forward(self, x, cos, sin):
        split = lambda t: t.view(*t.shape[:2], -1, self.head_dim)
        q = apply_rope(split(self.q_proj(x)), cos, sin).transpose(1, 2)
        k = apply_rope(split(self.k_proj(x)), cos, sin).transpose(1, 2)
        v = split(self.v_proj(x)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                             enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = MLP(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama with Hugging Face's parameter names."""

    def __init__(self, c):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.model.layers = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.model.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        if c.get("tie_word_embeddings"):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, cos, sin):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))


def rope_tables(c, sequence):
    """Returns cos and sin, (sequence, head_dim) each, computed in fp32 as Hugging Face does."""
    exponent = torch.arange(0, c["head_dim"], 2, dtype=torch.float32) / c["head_dim"]
    frequency = 1.0 / (c.get("rope_theta", 10000.0) ** exponent)
    angle = torch.outer(torch.arange(sequence, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def split_tensor_parallel(model, mesh):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput,
                                                   RowwiseParallel, SequenceParallel,
                                                   parallelize_module)
    sequence, whole = Shard(1), Replicate()
    gather = lambda n: PrepareModuleInput(input_layouts=(sequence,) + (None,) * n,
                                          desired_input_layouts=(whole,) + (None,) * n)
    row = lambda: RowwiseParallel(output_layouts=sequence)
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=sequence, use_local_output=False)}
    for i in range(len(model.model.layers)):
        plan |= {f"model.layers.{i}.{name}": style for name, style in {
            "input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
            "self_attn": gather(2), "mlp": gather(0),
            "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": row(),
            "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": row()}.items()}
    parallelize_module(model, mesh, plan)


def split_data_parallel(model, mesh):
    from torch.distributed.fsdp import fully_shard
    for i, layer in enumerate(model.model.layers):
        fully_shard(layer, mesh=mesh, reshard_after_forward=i + 1 < len(model.model.layers))
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def read_tokens(path):
    raw = pathlib.Path(path).read_bytes()
    magic, _, count = struct.unpack_from("<3i", raw)
    dtype = {20240520: np.uint16, 20240801: np.uint32}[magic]
    return torch.from_numpy(np.frombuffer(raw, dtype, count, 1024).astype(np.int64))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def make(args):
    """Writes random weights that resemble trained ones: norms differ from 1, projections are truncated normal."""
    config = json.loads(pathlib.Path(args.config).read_text())
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    pathlib.Path(args.out, "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(args.seed)
    state = {}
    for name, p in Llama(read_config(args.out)).state_dict().items():
        if p.dim() == 1:
            state[name] = 1 + 0.1 * torch.randn_like(p)
        else:
            state[name] = nn.init.trunc_normal_(torch.empty_like(p), std=0.04)
    if config.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    save_file(state, os.path.join(args.out, "model.safetensors"), metadata={"format": "pt"})


def train(args):
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if args.dp * args.tp != world:
        raise SystemExit(f"--dp {args.dp} x --tp {args.tp} is not the world size {world}")
    torch.set_num_threads(args.threads)
    config = read_config(args.model)
    model = Llama(config)
    model.load_state_dict(load_file(os.path.join(args.model, "model.safetensors")),
                          strict=not config.get("tie_word_embeddings"))
    dp_rank, dp_group = 0, None
    if world > 1:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
        if args.tp > 1:
            split_tensor_parallel(model, mesh["tp"])
        if args.dp > 1:
            split_data_parallel(model, mesh["dp"])
            dp_rank, dp_group = mesh.get_local_rank("dp"), mesh.get_group("dp")
    loss_scope = contextlib.nullcontext
    if args.tp > 1:
        from torch.distributed.tensor.parallel import loss_parallel as loss_scope
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), eps=1e-8,
                                  weight_decay=0.1, foreach=True)
    cos, sin = rope_tables(config, args.seq)
    tokens, rows, S = read_tokens(args.tokens), args.batch // args.dp, args.seq
    samples = (len(tokens) - 1) // S
    out = open(args.metrics, "w") if args.metrics and rank == 0 else None
    for step in range(args.steps):
        start = time.perf_counter()
        first = step * args.batch + dp_rank * rows
        x = torch.stack([tokens[n * S:n * S + S + 1]
                         for n in ((first + i) % samples for i in range(rows))])
        logits = model(x[:, :-1], cos, sin)
        with loss_scope():
            loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), args.clip, foreach=True))
        optimizer.step()
        optimizer.zero_grad()
        value = whole(loss.detach()).clone()
        if dp_group is not None:
            dist.all_reduce(value, group=dp_group)
            value /= args.dp
        row = {"step": step + 1, "loss": value.item(), "grad_norm": norm.item(),
               "step_time_s": time.perf_counter() - start}
        if out:
            out.write(json.dumps(row) + "\n")
            out.flush()
    if args.save:
        state = {name: whole(p).contiguous() for name, p in model.state_dict().items()}
        if rank == 0:
            save_file(state, args.save, metadata={"format": "pt"})
    if world > 1:
        dist.barrier()
        os._exit(0)  # skips the teardown of torch.distributed, which may abort


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("make")
    p.add_argument("--config", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--seed", type=int, default=0)
    p = commands.add_parser("train")
    p.add_argument("--model", required=True)
    p.add_argument("--tokens", required=True)
    for name, kind, default in (("steps", int, 10), ("batch", int, 4), ("seq", int, 128),
                                ("dp", int, 1), ("tp", int, 1), ("threads", int, 1),
                                ("lr", float, 1e-3), ("clip", float, 1.0),
                                ("metrics", str, ""), ("save", str, "")):
        p.add_argument("--" + name, type=kind, default=default)
    args = parser.parse_args()
    {"make": make, "train": train}[args.command](args)


if __name__ == "__main__":
    main()
