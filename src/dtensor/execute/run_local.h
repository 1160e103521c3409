// Runs planned operator calls on local tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <span>
#include <vector>

#include "plan/call_plan.h"

namespace tessera::detail {

/// Runs a call of kind kDirect, kLocal or kFailTogether on local tensors. Collective if the call
/// plan moves data, and for kFailTogether.
void run_local(PlannedCall& call, CallKind kind);

struct LocalRun {
  explicit LocalRun(PlannedCall& call);

  PlannedCall& call;
  /// the caller's tensors that the operator writes and returns
  c10::SmallVector<c10::IValue, 2> returned;
  at::Tensor viewed;  ///< base of a view operator's results; undefined for other operators

  /// A tensor that the operator wrote. Its new value may have to be copied to the caller's tensor.
  struct Written {
    at::Tensor original;  ///< the caller's tensor
    at::Tensor local;
    std::size_t input;
  };
  c10::SmallVector<Written, 2> written;
  /// The written tensors that are detached views (DetachedView); their bases are written later.
  std::vector<at::Tensor> written_views;
  std::vector<at::Tensor> locals;
  c10::Device device = c10::kCPU;           ///< device on which the operator draws random numbers
  std::vector<c10::IValue> view_arguments;  ///< the view operator's arguments, for a DetachedView

  /// Whether the base of a view was redistributed; the result is then a view of a copy of the base.
  bool is_moved() const { return call.plan.inputs.front().plan != nullptr; }
};

/// Replaces arguments by local tensors, redistributed to the layouts in the call plan. Collective
/// if the call plan moves data.
void localize_arguments(LocalRun& run);
/// Rewrites arguments with global sizes or memory offsets to values that fit local tensors.
void rewrite_arguments(LocalRun& run);
void wrap_results(LocalRun& run);

TensorSpecPtr replicated_spec(const CallPlan& plan, const at::Tensor& local);

/// Throws Error if a random operator would draw equal numbers for different batch rows on two
/// data-parallel ranks. Collective if the ranks must exchange their counts of batch rows.
void check_rows_together(const PlannedCall& call);

/// Runs an in-place random operator that draws each number by global index, so that every mesh
/// draws the same numbers. Collective only for a DetachedView, because its base is also written.
void run_random_inplace(PlannedCall& call);

/// Runs native_dropout, which draws by each element's global index: every mesh drops the same
/// elements. Collective if the tensor is Partial, because the tensor is then reduced first.
void run_native_dropout(PlannedCall& call);

}  // namespace tessera::detail
