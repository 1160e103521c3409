#pragma once
// Tensors with known values, conversions of distributed tensors, and comparisons.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "tessera/core/detail/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::testing {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The values depend only on the sizes and the seed, so all ranks get equal values.

/// Returns a tensor with the values 0, 1, 2, ... in row-major order.
inline at::Tensor counting_values(at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
  return at::arange(c10::multiply_integers(sizes), type).view(sizes);
}

/// Returns doubles in (-1, 1): element i is sin(1.7 i + seed).
inline at::Tensor values(at::IntArrayRef sizes, double seed = 0) {
  return at::sin(counting_values(sizes).mul(1.7).add(seed));
}

/// Returns floats evenly distributed in [-scale, scale]. Element i is a hash of i and `seed`.
inline at::Tensor uniform_values(at::IntArrayRef sizes, double seed, double scale = 1.0) {
  const at::Tensor hash = counting_values(sizes).mul(12.9898).add(seed).sin().mul(43758.5453);
  return hash.sub(hash.floor()).mul(2 * scale).sub(scale).to(at::kFloat);
}

inline at::Tensor normal_values(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

/// Returns token positions. Row i has documents of lengths[i] tokens; their positions start at 0.
inline at::Tensor document_positions(const std::vector<std::vector<std::int64_t>>& lengths) {
  std::vector<at::Tensor> rows;
  for (const std::vector<std::int64_t>& of_row : lengths) {
    std::vector<at::Tensor> row;
    for (const std::int64_t length : of_row) {
      row.push_back(at::arange(length, at::kLong));
    }
    rows.push_back(at::cat(row));
  }
  return at::stack(rows);
}

/// Returns the global tensor without autograd history; undefined if `tensor` is. Collective if
/// `tensor` is distributed.
inline at::Tensor full_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  const c10::NoGradGuard no_grad;
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor()
                                         : tensor.detach();
}

/// Returns rank i's local tensor of a Partial tensor on n ranks. The local tensors differ. Their
/// reduction is exactly `value`, if `value` has few significant bits.
inline at::Tensor term(const at::Tensor& value, ReduceOp op, std::int64_t i, std::int64_t n) {
  const bool last = i == n - 1;
  const auto step = static_cast<double>(i + 1);
  const double steps = static_cast<double>(n * (n - 1)) / 2;
  switch (op) {
    case ReduceOp::kMax:
      return last ? value : value - step;
    case ReduceOp::kMin:
      return last ? value : value + step;
    case ReduceOp::kAvg:
      return last ? value - steps : value + step;
    default:
      return last ? value * (1 - 0.25 * steps) - steps : value * (0.25 * step) + step;
  }
}

/// Returns this rank's local tensor of the global tensor `full`; if Partial, a term().
inline at::Tensor local_part(const at::Tensor& full, const DeviceMesh& mesh, const Layout& layout) {
  at::Tensor part = full;
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    const auto indices = global_indices(layout, dim, full.size(dim), mesh.coordinate());
    part = part.index_select(dim, at::tensor(indices, at::kLong));
  }
  for (const PartialDim& partial : layout.partial()) {
    part = term(part, partial.op, mesh.local_rank(partial.mesh_dim), mesh.size(partial.mesh_dim));
  }
  return part;
}

/// Returns a distributed leaf of autograd with the given global values and placements.
inline at::Tensor leaf_on(const DeviceMesh& mesh, const at::Tensor& values,
                          const Placements& placements) {
  return distribute_tensor(values, mesh, placements).tensor().detach().requires_grad_();
}

inline ::testing::AssertionResult Equal(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor a = full_tensor(found), b = full_tensor(expected);
  if (at::equal(a, b)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << a << "\nexpected\n" << b << "\n";
}

inline ::testing::AssertionResult Close(const at::Tensor& found, const at::Tensor& expected,
                                        double relative = 1e-5, double absolute = 1e-8,
                                        bool equal_nan = false) {
  const at::Tensor a = full_tensor(found), b = full_tensor(expected);
  if (at::allclose(a, b, relative, absolute, equal_nan)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << a << "\nexpected\n" << b << "\n";
}

/// Compares the tensors of two lists by Equal() or, with tolerances, by Close(). Two undefined
/// tensors are equal.
template <class... Tolerances>
::testing::AssertionResult EachPair(const std::vector<at::Tensor>& found,
                                    const std::vector<at::Tensor>& expected,
                                    Tolerances... tolerances) {
  if (found.size() != expected.size()) {
    return ::testing::AssertionFailure() << found.size() << " tensors, not " << expected.size();
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!found[i].defined() && !expected[i].defined()) {
      continue;
    }
    if (found[i].defined() != expected[i].defined()) {
      return ::testing::AssertionFailure() << "one tensor " << i << " is undefined";
    }
    const auto outcome = sizeof...(tolerances) == 0 ? Equal(found[i], expected[i])
                                                    : Close(found[i], expected[i], tolerances...);
    if (!outcome || found[i].sizes() != expected[i].sizes()) {
      return ::testing::AssertionFailure() << "tensor " << i << ": " << outcome.message();
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tessera::testing

namespace tessera {
using testing::full_tensor;
using testing::normal_values;
using testing::uniform_values;
}  // namespace tessera

// To add a message to a macro: EXPECT_EQUAL(a, b) << "text".
#define EXPECT_EQUAL(...) EXPECT_TRUE(::tessera::testing::Equal(__VA_ARGS__))
#define EXPECT_CLOSE(...) EXPECT_TRUE(::tessera::testing::Close(__VA_ARGS__))
#define EXPECT_EACH(...) EXPECT_TRUE(::tessera::testing::EachPair(__VA_ARGS__))
