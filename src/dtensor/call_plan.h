#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "forms/form.h"
#include "operator_info.h"
#include "redistribute.h"
#include "tensor_spec.h"

namespace tessera::detail {

/// How one operator is run on this rank for inputs that lie in one particular way: everything that
/// need not be found out again at the next such call.
struct CallPlan {
  struct Input {
    TensorSpecPtr spec;          ///< how it lies (a plain tensor: replicated)
    LayoutPtr target = nullptr;  ///< what it must be brought to, or nullptr: as it is
    PlanPtr plan;                ///< to `target`
    /// Where the operator leaves a new value of the tensor that has to be brought back to it: the
    /// layout of that value. Else nullptr.
    LayoutPtr written = nullptr;
  };
  struct Output {
    LayoutPtr layout = nullptr;
    std::vector<std::int64_t> sizes;
    std::optional<std::vector<std::int64_t>> strides;  ///< of a view, known beforehand
    TensorSpecPtr spec;                                ///< filled by the first call
    bool contiguous = false;  ///< local results are made so: ranks would not agree on strides
  };
  /// Run instead of the operator.
  struct LocalCall {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    double scale = 1.0;  ///< of its results
  };

  /// An argument that speaks of global sizes, with its local value.
  struct Rewritten {
    int argument;
    c10::IValue value;
    std::optional<std::vector<std::int64_t>> sizes;  ///< the value, of a list
  };

  ShardingSpec replicated;  ///< the mesh, and the layout of outputs where there is no rule
  bool has_rule = false;
  bool direct = false;          ///< run on the local tensors, wrap the result if any: nothing else
  bool random = false;          ///< draws random numbers
  bool together = false;        ///< if it fails on one rank, all throw (TESSERA_DEBUG)
  bool moves = false;           ///< an input is redistributed with a collective
  bool mixes_plain = false;     ///< a plain tensor of more than one element takes part
  bool compares_plain = false;  ///< ranks compare those first (TESSERA_DEBUG)
  std::vector<Input> inputs;    ///< every defined tensor, in schema order
  std::vector<Output> outputs;  ///< as ShardingRule::outputs
  std::vector<Rewritten> rewritten;
  std::optional<LocalCall> local_call;
  /// Run so instead, which sends less: nothing of the above but the mesh and the flags counts then.
  const Form* form = nullptr;
};

/// Whether ranks hold different values of what the operator gets.
inline bool is_split(const CallPlan::Input& input) {
  const LayoutPtr layout = input.target != nullptr ? input.target : input.spec->sharding.layout;
  return !layout->is_replicated();
}

/// Decides how to run the call. Not collective: every rank comes to the same decision, or throws
/// the same Error, from what all of them know.
CallPlan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info,
                   std::span<const c10::IValue> arguments);

/// Runs a planned call; the stack's arguments are replaced by its results. Collective if the plan
/// moves data.
void run_call(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
              torch::jit::Stack& stack);

}  // namespace tessera::detail
