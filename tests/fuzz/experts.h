#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fuzz/layers.h"
#include "tessera/nn/module.h"

namespace tessera::fuzz {

/// Four experts whose weights are stacked, (experts, in, out); a router sends each token to two.
class Experts : public nn::Module<Experts> {
 public:
  using Activation = std::function<at::Tensor(const at::Tensor&)>;

  Experts(std::int64_t dim, std::int64_t inner, Activation activation);
  /// The result, as x, and a loss of the router that is a sum over the tokens.
  std::vector<at::Tensor> forward(const at::Tensor& x);

 private:
  Activation activation_;
  Layer router_;
  nn::Parameter up_, down_;
};

}  // namespace tessera::fuzz
