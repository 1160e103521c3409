#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <span>
#include <vector>

#include "call_plan.h"
#include "operator_info.h"

namespace tessera::detail {

/// The tensors that a call of the _foreach_add_ kind writes to. Of those libtorch counts no write
/// above the kernels: CUDA's count them themselves, others by the operators that they are made of,
/// which count nothing where they run on local tensors.
class ListWrites {
 public:
  /// Of another operator: none.
  ListWrites(const OperatorInfo& info, std::span<const c10::IValue> arguments);

  /// Counts a write to each of which the kernel has counted none.
  void count() const;

 private:
  struct Written {
    at::Tensor tensor;
    std::uint32_t version;
    bool counted() const;
  };
  std::vector<Written> written_;
};

/// The same without a list of its own, for `tensors` that a kernel has as they are: of those it
/// counts all, or none.
class DirectListWrites {
 public:
  explicit DirectListWrites(at::TensorList tensors);
  void count() const;

 private:
  at::TensorList tensors_;
  std::uint32_t version_;
};

/// Whether a call of the _foreach_add_ kind has to go position by position, as its kernels do: one
/// position writes what another one uses, and a copy of that would be written. The same on all
/// ranks.
bool goes_by_position(const OperatorInfo& info, const CallPlan& plan,
                      std::span<const c10::IValue> arguments);

/// Runs it so; the arguments are taken from the stack. Collective if the plan moves data.
void run_by_position(const c10::OperatorHandle& op, const OperatorInfo& info,
                     torch::jit::Stack& stack);

}  // namespace tessera::detail
