// Composite operators that make plain tensors of their own (a mask, a window, positions), which are
// the same on all ranks. They are composed as always, with those tensors taken for replicated.

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <optional>

#include "bound_call.h"
#include "override_composite.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/policy.h"

namespace tessera::detail {
namespace {

/// Whether the caller has passed a distributed tensor, and no plain one for which nobody vouches.
bool is_vouched_for(const std::vector<at::Tensor>& tensors) {
  const auto fits = [](const at::Tensor& tensor) {
    return tessera::is_distributed(tensor) || tensor.numel() <= 1;
  };
  return std::ranges::any_of(tensors, tessera::is_distributed) &&
         std::ranges::all_of(tensors, fits);
}

void compose(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& info = operator_info(op);
  const auto count = info.arguments.size();
  const auto tensors = bind_call(info, std::span<const c10::IValue>(*stack).last(count)).tensors;
  std::optional<ReplicationScope> scope;
  if (is_vouched_for(tensors)) scope.emplace();
  c10::DispatchKeySet keys;
  for (const auto& tensor : tensors) keys = keys | tensor.key_set();
  const auto below =
      c10::after_ADInplaceOrView_keyset - c10::DispatchKeySet(c10::DispatchKey::Fake);
  op.redispatchBoxed(keys & below, stack);
}

void implement_composites(torch::Library& library) {
  for (const char* name :
       {"_scaled_dot_product_attention_math", "combinations", "ctc_loss.IntList", "istft",
        "linalg_matrix_power", "linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float",
        "linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.tol_tensor", "matrix_power",
        "nanquantile", "nanquantile.scalar", "one_hot", "quantile", "quantile.scalar"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compose>());
  }
}

TESSERA_OVERRIDE_COMPOSITE(implement_composites)

}  // namespace
}  // namespace tessera::detail
