#!/usr/bin/env python3
"""A training step like llama_train's in PyTorch: the same model and tokens, bf16 computation with fp32 master weights
(fp32 on a CPU), fused AdamW, gradient clipping. Writes one JSON object per step.

  --parallel fsdp   FSDP2 with fp32 shards: on one rank as a job of several ranks runs it, or on torchrun's ranks
  --parallel none   without FSDP: bf16 parameters, and fp32 master weights in the optimizer
  --compile         torch.compile of each layer, and of head and loss together
"""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--tokens", required=True, help="llm.c token shard")
    parser.add_argument("--batch", type=int, required=True, help="sequences of a step, over all ranks")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True, help="least number of steps that are not measured")
    parser.add_argument("--warm-seconds", type=float, default=0, help="least time of the steps that are not measured; on one rank")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ac", default="none", choices=["none", "full"])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--parallel", default="fsdp", choices=["fsdp", "none"])
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="of FSDP2's collectives")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    options.ranks = int(os.environ.get("WORLD_SIZE", 1)) if options.parallel == "fsdp" else 1
    options.rank = int(os.environ.get("RANK", 0)) if options.ranks > 1 else 0
    options.batch //= options.ranks  # now of each rank
    return options


def head_and_loss(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), targets.flatten())


class WithLoss(torch.nn.Module):
    """The model with its loss. Compiled, head and loss are one graph, which needs no fp32 logits in memory."""

    def __init__(self, config, options):
        super().__init__()
        self.llama = torch_llama.Llama(config)
        layers = self.llama.model.layers
        for i, layer in enumerate(layers):
            if options.ac == "full":
                layers[i] = layer = checkpoint_wrapper(layer)
            if options.compile:
                layer.compile()
        self.loss = torch.compile(head_and_loss) if options.compile else head_and_loss

    def forward(self, tokens, targets, cos, sin):
        model = self.llama.model
        x = model.embed_tokens(tokens)
        for layer in model.layers:
            x = layer(x, cos, sin)
        return self.loss(model.norm(x), self.llama.lm_head.weight, targets)


def shard(model, device, dtype):
    """Makes each layer an FSDP unit that is resharded after forward, as in llama_train on one rank."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.llama.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Trainer:
    """Updates the optimizer's parameters: the model's parameters, or their fp32 master weights."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.parameters]
        self.copied = [(p, m) for p, m in zip(self.parameters, self.masters) if p is not m]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step(self):
        for parameter, master in self.copied:
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.copied:
            torch._foreach_copy_([p for p, _ in self.copied], [m for _, m in self.copied])


def attention_backend(config, options, device, dtype):
    """Returns the kernel that scaled_dot_product_attention chooses for this model."""
    def heads(count):
        return torch.empty(options.batch, count, options.seq, config["head_dim"], device=device, dtype=dtype, requires_grad=True)
    q, kv = config["num_attention_heads"], config["num_key_value_heads"]
    chosen = torch._fused_sdp_choice(heads(q), heads(kv), heads(kv), is_causal=True, enable_gqa=q != kv)
    return torch.nn.attention.SDPBackend(chosen).name


def batches(options, device):
    """Returns this rank's part of the samples of llama_train: consecutive windows of seq + 1 tokens that overlap by one."""
    tokens, seq = torch_llama.read_tokens(options.tokens), options.seq
    samples = (len(tokens) - 1) // seq
    first = options.rank * options.batch
    while True:
        rows = [(first + i) % samples * seq for i in range(options.batch)]
        yield torch.stack([tokens[row:row + seq + 1] for row in rows]).to(device)
        first += options.batch * options.ranks


def main():
    options = parse()
    config = torch_llama.read_config(options.config)
    device, on_gpu = options.device, options.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) if options.ranks > 1 else 0)
    with torch.device(device):
        model = WithLoss(config, options)
    if options.parallel == "fsdp":
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if options.ranks == 1 else {}
        dist.init_process_group(options.backend or ("nccl" if on_gpu else "gloo"), **alone)
        shard(model, device, dtype)
    else:
        model.to(dtype)
    trainer = Trainer(model)
    cos, sin = (table.to(device, dtype) for table in torch_llama.rope_tables(config, options.seq))
    same = {"attention": attention_backend(config, options, device, dtype), "torch": torch.__version__}
    began, measured, steps = time.perf_counter(), 0, 0
    for tokens in batches(options, device):
        is_warm = steps >= options.warm and time.perf_counter() - began >= options.warm_seconds
        if measured == options.steps:
            break
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:], cos, sin)
        loss.backward()
        trainer.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        steps += 1
        if is_warm:
            measured += 1
            if options.rank == 0:
                print(json.dumps({"step": steps, "loss": loss.item(), "step_time_s": seconds,
                                  "tokens_per_s": options.batch * options.ranks * options.seq / seconds,
                                  "peak_memory_bytes": torch.cuda.max_memory_reserved() if on_gpu else None} | same),
                      flush=True)
    # Exits without interpreter shutdown: autograd's thread may still release FSDP's callback of the last step, for
    # which it takes the GIL. If the interpreter is shutting down, that aborts the process (PyTorch 2.11).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
