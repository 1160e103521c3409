// Helpers for tests that compare the results and gradients of functions, or parameter names.

#pragma once

#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/module.h"
#include "testing/distributed.h"

namespace tessera::testing {

using GraphFunction = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

inline at::Tensor libtorchs(const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias = {}) {
  return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
}

inline std::vector<at::Tensor> leaves_of(const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& value : values) {
    leaves.push_back(value.detach().clone().requires_grad_());
  }
  return leaves;
}

/// Returns the result and, for a random gradient of the result, the gradients of the inputs.
inline std::vector<at::Tensor> results_of(const GraphFunction& function,
                                          const std::vector<at::Tensor>& values) {
  const std::vector<at::Tensor> inputs = leaves_of(values);
  const at::Tensor y = function(inputs);
  y.backward(normal_values(y.sizes(), 99).to(y.scalar_type()));
  std::vector<at::Tensor> results{y.detach()};
  for (const at::Tensor& input : inputs) {
    results.push_back(input.grad());
  }
  return results;
}

inline void expect_equal_bits(const GraphFunction& a, const GraphFunction& b,
                              const std::vector<at::Tensor>& values) {
  EXPECT_EACH(results_of(a, values), results_of(b, values));
}

inline at::Tensor leaf(at::IntArrayRef sizes, double seed) {
  return uniform_values(sizes, seed).requires_grad_();
}

struct Counted {
  nn::CheckpointOptions options{.counts = std::make_shared<nn::CheckpointCounts>()};
  const nn::CheckpointCounts* operator->() const { return options.counts.get(); }
};

inline std::vector<std::string> names_of(const nn::NamedSlots& slots) {
  std::vector<std::string> names;
  for (const auto& [name, slot] : slots) {
    names.push_back(name);
  }
  return names;
}

}  // namespace tessera::testing
