#include "examples/bench_mfu/shapes.h"

#include <algorithm>

namespace bench {
namespace {

constexpr std::string_view kQwen7b = R"({"architectures": ["Qwen2ForCausalLM"],
 "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
 "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
 "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "max_position_embeddings": 131072, "initializer_range": 0.02, "tie_word_embeddings": false}
)";

constexpr std::string_view kQwen1b = R"({"architectures": ["Qwen2ForCausalLM"],
 "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
 "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
 "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "max_position_embeddings": 131072, "initializer_range": 0.02, "tie_word_embeddings": true}
)";

constexpr std::string_view kLlama8b = R"({"architectures": ["LlamaForCausalLM"],
 "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
 "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
 "max_position_embeddings": 8192, "initializer_range": 0.02, "tie_word_embeddings": false}
)";

}  // namespace

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {"llmq-1.5b", kQwen1b, 1024, 16,
       "llmq on one H100, bf16: 58,000 tokens/s; at the GPU's peak its products would take 55 % of "
       "that time"},
      {"llmq-7b", kQwen7b, 1024, 4,
       "llmq on one H100, bf16: 14,000 tokens/s; at the GPU's peak its products would take 60 % of "
       "that time"},
      {"torchtitan-8b", kLlama8b, 8192, 1,
       "torchtitan on 8 H100, bf16, FSDP: 33 % MFU eager, 39 to 40 % compiled"}};
  return all;
}

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const Shape& shape : shapes()) {
    names.emplace_back(shape.name);
  }
  return names;
}

const Shape& shape_of(std::string_view name) {
  return *std::ranges::find(shapes(), name, &Shape::name);
}

}  // namespace bench
