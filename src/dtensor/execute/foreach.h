#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "plan/call_plan.h"

namespace tessera::detail {

/// Whether a call of kind kForeach has to go position by position, as its kernels do: one position
/// writes what another one uses, and a copy of that would be written. The same on all ranks.
bool positions_depend(const PlannedCall& call);

/// The version counts of the tensors that a call of the _foreach_add_ kind writes to. libtorch
/// counts those writes in no layer above the kernels: CUDA's kernels bump the versions themselves,
/// others by the operators that they are made of, which bump nothing where they run on local
/// tensors.
class ForeachVersionCounts {
 public:
  /// Reads them before the call. Of another operator: none.
  explicit ForeachVersionCounts(const PlannedCall& call);

  /// Bumps versions that the kernel did not bump.
  void bump() const;

 private:
  struct Written {
    at::Tensor tensor;
    std::uint32_t version;
  };
  std::vector<Written> written_;
};

/// The same without making a list, for the `tensors` of a kernel: it bumps all versions, or none.
class DirectForeachVersionCounts {
 public:
  explicit DirectForeachVersionCounts(at::TensorList tensors);
  void bump() const;

 private:
  at::TensorList tensors_;
  std::uint32_t version_;
};

}  // namespace tessera::detail
