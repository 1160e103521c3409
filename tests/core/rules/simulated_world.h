#pragma once

#include <cstdint>
#include <vector>

#include "core/layout/oracle.h"
#include "tessera/core/detail/redistribute_plan.h"

namespace tessera::testing {

/// All ranks of a mesh in one process, with the local elements of one tensor. Element i (row-major)
/// of the whole tensor is i + 1; partial ranks have terms that reduce to it. Ownership is computed
/// by the oracle. Runs a plan step by step; a rank sees only the elements of its group.
class SimulatedWorld {
 public:
  SimulatedWorld(LayoutPtr layout, Indices sizes);

  /// Runs one step; fails the running test if the step is impossible or does not start from the
  /// current layout.
  void run(const Step& step);
  /// Expects that every rank has the elements of `layout`, with the right values.
  void expect_correct(LayoutPtr layout) const;
  /// The most elements that one rank sends in `step` (before it runs).
  std::int64_t most_sent(const Step& step) const;

 private:
  /// The value of each element of the tensor; NaN if the rank lacks it.
  using Local = std::vector<double>;

  std::vector<bool> owned(const Layout& layout, const Indices& coordinate) const;
  std::vector<std::size_t> group(std::size_t rank, const std::vector<int>& mesh_dims) const;
  double combine(std::size_t rank, const Step& step, std::size_t element) const;
  double received(std::size_t rank, const Step& step, std::size_t element) const;

  Indices sizes_;
  std::vector<Indices> coordinates_;
  LayoutPtr layout_;
  std::vector<Local> locals_;
};

}  // namespace tessera::testing
