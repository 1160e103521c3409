#!/usr/bin/env python3
"""torch_llama.py with the Mixtral of `transformers` as its model, under FSDP2 (fully_shard for each layer)."""
import torch_llama
import transformers


def compute_no_rows(mixture, _, outputs):
    """Computes no rows by the experts that no token has chosen. FSDP2 fails if a parameter has a gradient on only some ranks."""
    result, logits = outputs
    chosen = set(logits.topk(mixture.top_k).indices.unique().tolist())
    for i, expert in enumerate(mixture.experts):
        if i not in chosen:
            result = result + expert(result.flatten(0, 1)[:0]).sum()
    return result, logits


class Mixtral(transformers.MixtralForCausalLM):
    def __init__(self, config):
        super().__init__(transformers.MixtralConfig(**config, attn_implementation="sdpa"))
        for layer in self.model.layers:
            layer.block_sparse_moe.register_forward_hook(compute_no_rows)

    def forward(self, tokens, cos, sin):
        return super().forward(tokens, use_cache=False).logits


torch_llama.Llama = Mixtral
if __name__ == "__main__":
    torch_llama.main()
