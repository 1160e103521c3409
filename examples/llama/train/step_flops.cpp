// FLOPs of a training step: of all gradients, or of those that are left where weights are frozen.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "examples/llama/train/setup.h"
#include "tessera/observe/flops.h"

namespace llama {

using namespace tessera;

namespace {

/// FLOPs of a product: 2 for each weight and token, as often again for the gradient of its input,
/// and of the weight.
constexpr double kProduct = 2;

/// Where a parameter is in forward: 0 for the embedding, then a layer each, then what follows them.
std::int64_t stage_of(const std::string& name, const Config& config) {
  const std::string layers = "model.layers.";
  if (name.starts_with(layers)) {
    return 1 + std::stoll(name.substr(layers.size()));
  }
  return name.starts_with("model.embed_tokens") ? 0 : 1 + config.num_hidden_layers;
}

bool is_trained(const nn::ParameterSlot& slot) {
  return slot.get().requires_grad();
}

/// The stage from which on a step has gradients.
std::int64_t first_trained(const Llama& model) {
  std::int64_t first = 1 + model.config().num_hidden_layers;
  for (const auto& [name, slot] : model.named_slots()) {
    if (is_trained(*slot)) {
      first = std::min(first, stage_of(name, model.config()));
    }
  }
  return first;
}

/// Whether a product has a gradient of its input: one of the first layer with a trained weight may
/// lie before that weight, but few do.
bool has_input_gradient(std::int64_t stage, std::int64_t first, const Config& config) {
  return stage > first || (stage == first && stage <= config.num_hidden_layers);
}

/// An embedding is a look-up and has no product, unless it is also the head.
double products_of(const Llama& model, std::int64_t first) {
  const Config& config = model.config();
  double flops = 0;
  for (const auto& [name, slot] : model.named_slots()) {
    const std::int64_t stage = stage_of(name, config);
    if (stage == 0 && !config.tie_word_embeddings) {
      continue;
    }
    const std::int64_t product = stage > 0 ? stage : 1 + config.num_hidden_layers;
    const int of_gradients =
        int{has_input_gradient(product, first, config)} + int{is_trained(*slot)};
    flops += kProduct * (1 + of_gradients) * static_cast<double>(slot->get().numel());
  }
  return flops;
}

/// Attention has two products a layer, and two for each in backward.
double attention_of(const Config& config, std::int64_t sequence, std::int64_t first) {
  const std::int64_t layers = config.num_hidden_layers;
  const auto with_gradient = static_cast<double>(layers - std::max<std::int64_t>(first - 1, 0));
  const auto scores = static_cast<double>(config.num_attention_heads * config.head_dim * sequence);
  return 2 * kProduct * scores * (static_cast<double>(layers) + 2 * with_gradient);
}

}  // namespace

observe::ModelFlops flops_of(const TrainOptions& o, const Config& config) {
  if (o.freeze.empty() && o.lora_rank == 0) {
    const ParameterCount count = count_parameters(config);
    return observe::model_flops(count.total, config.tie_word_embeddings ? 0 : count.embedding,
                                config.num_hidden_layers,
                                config.num_attention_heads * config.head_dim, o.seq);
  }
  const std::shared_ptr<Llama> model = make_meta_model(o, config);
  const std::int64_t first = first_trained(*model);
  const double products = products_of(*model, first);
  const double attention = attention_of(config, o.seq, first);
  return {products + attention, products + attention / 2};
}

}  // namespace llama
