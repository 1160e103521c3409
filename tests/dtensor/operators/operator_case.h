#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/core/placement.h"

namespace tessera::testing {

/// A function whose results on distributed and on plain fp64 tensors are compared.
struct OperatorCase {
  std::string name;
  std::vector<std::vector<std::int64_t>> inputs;  ///< `inputs`: the sizes of the inputs
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

/// Compares the results and gradients of a case on a mesh with those of plain tensors. The inputs
/// have random layouts. A leaf and its gradient must have the same layout.
void expect_equals_one_rank(const OperatorCase& c, const std::vector<std::int64_t>& mesh_sizes);

using Attention = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

/// Expects that `attention` on a 2 x 2 mesh, with queries, keys and values in `placements`, has the
/// result and gradients of `attention` on plain tensors, and communicates nothing.
void expect_attention_of_parts(const std::vector<at::Tensor>& plain, const Attention& attention,
                               const Placements& placements = {Shard{0}, Shard{1}});

at::Tensor beside(const at::Tensor& other, const at::Tensor& tensor);

/// A test suite that runs each case on meshes of 4, 2 x 2 and 3 x 2 ranks.
class Operators : public ::testing::TestWithParam<OperatorCase> {};

}  // namespace tessera::testing
