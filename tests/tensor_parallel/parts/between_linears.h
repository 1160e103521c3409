#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"

namespace tessera::tensor_parallel {

/// What a model does with the part that a rank has of the features.
using OfPart = std::function<at::Tensor(const at::Tensor&)>;

/// (tokens, 6) -> (tokens, 24), what the test does between, (tokens, features) -> (tokens, 6).
class BetweenLinears : public nn::Module<BetweenLinears> {
 public:
  BetweenLinears(OfPart between, std::int64_t features) : between_(std::move(between)) {
    into = register_module("into", std::make_shared<nn::Linear>(6, 24));
    out_of = register_module("out_of", std::make_shared<nn::Linear>(features, 6));
  }
  at::Tensor forward(const at::Tensor& x) { return (*out_of)(between_((*into)(x))); }

  std::shared_ptr<nn::Linear> into, out_of;

 private:
  OfPart between_;
};

}  // namespace tessera::tensor_parallel
