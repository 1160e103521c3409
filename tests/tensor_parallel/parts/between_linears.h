#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <utility>

#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/module_values.h"

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

/// What a model does with a part, and what is said of it.
struct PartCase {
  const char* name;
  OfPart between;
  const char* message = "";
  std::int64_t features = 24;  ///< that it hands out, of all ranks
};
inline std::ostream& operator<<(std::ostream& out, const PartCase& c) {
  return out << c.name;
}

/// (tokens, 6)
inline at::Tensor four_tokens() {
  return testing::uniform_values({4, 6}, 0.5);
}

inline ParallelizePlan plan_between() {
  return {{"into", colwise_parallel()}, {"out_of", rowwise_parallel()}};
}

}  // namespace tessera::tensor_parallel
