#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

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

struct OperatorCases : std::vector<OperatorCase> {
  template <class Run>
  void add(const char* name, const std::vector<std::vector<std::int64_t>>& inputs, Run run,
           bool differentiable = true) {
    push_back({name, inputs, run, differentiable});
  }
};

/// Runs a case on a mesh of `mesh_sizes` with all inputs in random layouts (any order of mesh
/// dimensions on a dimension, local digits in front, partial, uneven), forward and backward, and
/// expects values and gradients of plain libtorch, and gradients that lie as their leaves.
void expect_equals_one_rank(const OperatorCase& c, const std::vector<std::int64_t>& mesh_sizes);

/// `tensor` replicated over the mesh of `other`, if that is distributed.
at::Tensor beside(const at::Tensor& other, const at::Tensor& tensor);

/// Cases on a line of 4, and on grids of 2 x 2 and 3 x 2. Several files instantiate it.
class Operators : public ::testing::TestWithParam<OperatorCase> {};

}  // namespace tessera::testing
