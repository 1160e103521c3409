"""Small random models of each kind, written by transformers."""
POSITIONS = 32
COMMON = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
          "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12,
          "max_position_embeddings": POSITIONS, "rope_theta": 500.0, "initializer_range": 0.2,
          "bos_token_id": None, "eos_token_id": None}
LLAMA = COMMON | {"model_type": "llama"}


def scaled(kind, **values):
    return LLAMA | {"rope_scaling": {"rope_type": kind, "factor": 4.0, **values}}


MODELS = {
    "llama1": LLAMA | {"num_key_value_heads": 8},
    "llama2_with_biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama3": scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=POSITIONS)
              | {"tie_word_embeddings": True, "max_position_embeddings": 4 * POSITIONS},
    "linear": scaled("linear"),
    "dynamic": scaled("dynamic"),
    "yarn": scaled("yarn", original_max_position_embeddings=POSITIONS),
    "yarn_with_all": scaled("yarn", original_max_position_embeddings=POSITIONS, beta_fast=16.0,
                            beta_slow=2.0, mscale=0.8, mscale_all_dim=1.2, truncate=False),
    "mistral": COMMON | {"model_type": "mistral", "sliding_window": None},
    "mistral_with_window": COMMON | {"model_type": "mistral", "sliding_window": 20},
    "qwen2": COMMON | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": COMMON | {"model_type": "qwen3"},
}


def make(folder, values):
    """A random model, far enough from zeros and ones that each weight is seen."""
    import torch
    import transformers
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.3)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model.eval()
