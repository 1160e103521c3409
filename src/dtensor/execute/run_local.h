// Running a planned call on local tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <span>
#include <vector>

#include "plan/call_plan.h"

namespace tessera::detail {

/// Runs a call on the local tensors, as the kinds kDirect, kLocal, kFailTogether, kAgreed and
/// kRecorded of its plan say. Collective if the plan moves data, and as kFailTogether.
void run_local(PlannedCall& call, CallKind kind);

/// Runs a call that may throw on some ranks only, because of their values: run_local, then one
/// all-reduce of one number over the whole mesh. Returns true if no rank threw c10::Error.
/// Otherwise the stack has the arguments replicated: the same call with those throws on every rank,
/// with the message for the whole tensor. Collective.
bool run_agreed(PlannedCall& call);

/// Whether gradients are needed of a call that autograd has not recorded: the kernel of an operator
/// that autograd does not know (kRecorded). Throws Error, on all ranks, for an operator whose
/// kernel cannot be recorded on local tensors instead.
bool is_to_be_recorded(const OperatorInfo& info, std::span<const c10::IValue> arguments);

/// The state of one call in the steps of run_local.
struct LocalRun {
  explicit LocalRun(PlannedCall& call);

  PlannedCall& call;
  bool recorded = false;  ///< autograd records the operator on the local tensors (kRecorded)
  /// The written arguments as the caller passed them, which become results.
  c10::SmallVector<c10::IValue, 2> returned;
  at::Tensor viewed;  ///< by the results of a view operator

  /// A tensor whose new value the operator leaves elsewhere, or in another layout than its own.
  struct Written {
    at::Tensor original;  ///< as the caller passed it
    at::Tensor local;     ///< what the operator writes to
    std::size_t input;    ///< its number among the call's tensors
  };
  c10::SmallVector<Written, 2> written;
  std::vector<at::Tensor> written_views;    ///< detached ones, whose base is to be written as well
  std::vector<at::Tensor> locals;           ///< all local tensors, where a local call takes them
  c10::Device device = c10::kCPU;           ///< that random numbers are drawn on
  std::vector<c10::IValue> view_arguments;  ///< local ones, with which a moved view is taken again

  /// Whether the base of a view operator was redistributed first: the result is then a view of a
  /// copy.
  bool is_moved() const { return call.plan.inputs.front().plan != nullptr; }
};

// The steps, in order.

/// Replaces the arguments by local tensors, redistributed by the plan. Collective if it moves data.
void localize_arguments(LocalRun& run);
/// Rewrites arguments about global sizes or memory for the local tensors.
void rewrite_arguments(LocalRun& run);
/// Runs the operator, or the plan's replacement. Not collective.
void run_operator(LocalRun& run);
/// Copies written values to the caller's tensors. Collective only for written_views.
void write_back(LocalRun& run);
/// Wraps the results as distributed tensors.
void wrap_results(LocalRun& run);

/// The spec of a local tensor that is the whole one, where there is no rule.
TensorSpecPtr replicated_spec(const CallPlan& plan, const at::Tensor& local);

/// Throws Error for a call that draws its numbers sequentially while data-parallel ranks have
/// different rows: they would all draw the same numbers. Collective if ranks must compare rows.
void check_rows_together(const PlannedCall& call);

/// Runs an in-place random operator by the global element: nothing is gathered, and every mesh
/// draws the same numbers. The call's arguments on the stack are replaced by its result. Not
/// collective but where the tensor is a view of one that had to be gathered.
void run_random_inplace(PlannedCall& call);

/// Runs native_dropout by the global element: every mesh drops the same ones. The call's arguments
/// on the stack are replaced by its results. Collective where the tensor is a pending reduction,
/// which is carried out first.
void run_native_dropout(PlannedCall& call);

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
