// Lays the zeros of a gradient formula out as what is written to them. Without this, the gradient
// of an operator that picks elements would be redistributed to the layout that the zeros happen to
// have. The operators that write so, with their functional forms, are rows of operator_traits.cpp;
// fallback.cpp asks here for plans of two kinds.

#include "execute/backward_zeros.h"

#include <ATen/core/grad_mode.h>

#include <optional>

#include "rank/rank_thread.h"
#include "tensor/distributed_impl.h"
#include "tessera/internals/detail/running_backward.h"

namespace tessera::detail {
namespace {

/// The last zeros that this thread's backward has made and not written to. Weak: they stay alive
/// for no one, and a tensor that has died can't be taken for a new one at its address.
std::optional<WeakTensor>& last_zeros() {
  return RankThread::here().zeros;
}

/// Only without a recorded graph: if backward records one, the graph holds the zeros.
bool inside_backward() {
  return backward_id() >= 0 && !at::GradMode::is_enabled();
}

bool are_last_zeros(const at::Tensor& tensor) {
  if (!inside_backward() || !last_zeros()) {
    return false;
  }
  return last_zeros()->lock().is_same(tensor);
}

}  // namespace

void note_backward_zeros(const at::Tensor& zeros) {
  if (inside_backward()) {
    last_zeros().emplace(zeros);
  }
}

bool write_to_backward_zeros(PlannedCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  DistributedTensorImpl* impl = as_distributed(self);
  if (impl == nullptr || !are_last_zeros(self)) {
    return false;
  }
  // In any case, they do not count as untouched any more.
  last_zeros().reset();
  const c10::OperatorHandle& functional = *call.info.functional;
  // The same arguments, without those at the end that only the in-place form has.
  call.stack.resize(call.first + functional.schema().arguments().size());
  functional.callBoxed(call.stack);
  const at::Tensor result = call.stack.back().toTensor();
  const DistributedTensorImpl* written = as_distributed(result);
  // The wrapper stays, which the formula holds; its local tensor and layout are the result's.
  impl->replace(written->local(), written->spec());
  call.stack.back() = self;
  return true;
}

}  // namespace tessera::detail
