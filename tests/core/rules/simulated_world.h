#pragma once

#include <cstdint>
#include <vector>

#include "core/layout/oracle.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera::testing {

/// All ranks of a mesh in one process, each with the elements of one tensor that it holds. Element
/// i (row-major) of the true tensor has the value i + 1; partial ranks hold terms that reduce to
/// it. Ownership is the oracle's. Runs a plan step by step, and lets a rank see nothing but its
/// group.
class SimulatedWorld {
 public:
  SimulatedWorld(LayoutPtr layout, Indices sizes);

  /// Executes one step; fails the running test where the step cannot be done or doesn't start here.
  void run(const Step& step);
  /// Expects that every rank holds what `layout` says, with the right values.
  void expect_correct(LayoutPtr layout) const;
  /// The most elements that one rank sends in `step` (before it runs).
  std::int64_t most_sent(const Step& step) const;

 private:
  /// Value of each element of the tensor; NaN where the rank doesn't hold it.
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
