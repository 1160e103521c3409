#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/models/llama_config.h"
#include "tessera/tessera.hpp"
#include "testing/values.h"

namespace tessera::models {

struct Shape {
  const char* config;
  std::int64_t batch, sequence;
  int steps = 3;
};

/// The sizes 61 and 37 are prime, so 2 or more ranks get uneven shards.
inline constexpr Shape kOddShape{
    R"({"vocab_size": 61, "hidden_size": 60, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.1})",
    24, 9};

struct Outcome {
  std::vector<double> losses;  ///< for each step, the mean loss of this rank's rows
  std::vector<double> norms;
  std::vector<at::Tensor> gradients;  ///< gradients of the first step
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
};

struct Part {
  std::int64_t part = 0, parts = 1;
  std::function<void()> before_step{};
};

inline std::shared_ptr<Llama> make_llama(const Shape& shape) {
  auto model = std::make_shared<Llama>(detail::parse_config(shape.config, "test"), shape.sequence);
  nn::init_weights(*model, 7);
  return model;
}

/// Returns rows [first, last) of the batch, (rows, sequence + 1): inputs and next-token targets.
inline at::Tensor tokens_of(const Shape& shape, std::int64_t vocabulary, std::int64_t step,
                            std::int64_t first, std::int64_t last) {
  const std::int64_t width = shape.sequence + 1;
  const at::Tensor index =
      at::arange(first * width, last * width, c10::kLong) + step * shape.batch * width;
  return (index * index * 7 + index * 3).remainder(vocabulary).view({-1, width});
}

/// Runs forward and backward of this rank's rows of the batch. Returns the mean loss of these rows.
inline double run_backward(Llama& model, const Shape& shape, const Part& part, std::int64_t step) {
  const std::int64_t rows = shape.batch / part.parts, first = part.part * rows;
  const at::Tensor tokens = tokens_of(shape, model.config().vocab_size, step, first, first + rows);
  const at::Tensor loss =
      tensor_parallel::cross_entropy(model(tokens.slice(1, 0, -1)), tokens.slice(1, 1).flatten());
  loss.backward();
  return loss.item<double>();
}

inline Outcome train(Llama& model, const Shape& shape, const Part& part = {}) {
  Outcome outcome;
  std::vector<nn::SlotPtr> slots;
  for (const auto& [name, slot] : model.named_slots()) {
    slots.push_back(slot);
    outcome.names.push_back(name);
  }
  // If eps were small, the first updates would be the signs of the gradients, and rounding would
  // decide the sign of a gradient near zero.
  optim::AdamW optimizer(slots, {.lr = 0.01, .eps = 1e-3});
  for (int step = 0; step < shape.steps; ++step) {
    outcome.losses.push_back(run_backward(model, shape, part, step));
    if (step == 0) {
      for (const auto& slot : slots) {
        outcome.gradients.push_back(full_tensor(slot->persistent().grad()).clone());
      }
    }
    outcome.norms.push_back(optim::clip_grad_norm_(slots, 0.5).item<double>());
    if (part.before_step) {
      part.before_step();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& slot : slots) {
    outcome.parameters.push_back(full_tensor(slot->persistent()).clone());
  }
  return outcome;
}

}  // namespace tessera::models
