#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace tessera::testing {

/// A function of tensors, all of double, to be compared with itself on one rank.
struct OperatorCase {
  std::string name;
  std::vector<std::vector<std::int64_t>> inputs;  ///< sizes; values are all different
  std::function<at::Tensor(const std::vector<at::Tensor>&)> run;
  bool differentiable = true;
};

inline std::ostream& operator<<(std::ostream& out, const OperatorCase& c) {
  return out << c.name;
}

/// Runs a case on a mesh of `mesh_sizes` with the first input in every placement (the others
/// replicated), forward and backward, and expects values and gradients of plain libtorch, and
/// gradients that lie as their leaves.
void expect_equals_one_rank(const OperatorCase& c, const std::vector<std::int64_t>& mesh_sizes);

}  // namespace tessera::testing
