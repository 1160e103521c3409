// Writes to views of a tensor that is split along a dimension that the view splits or joins. The
// viewed tensor had to be gathered, so the view holds a copy (tensor/detached_view.h). A write to
// it is repeated on its base, by taking the view once more. Code that writes to such a view calls
// write_through.

#include "views/view_writes.h"

#include <ATen/ops/empty_strided.h>

#include <utility>
#include <vector>

#include "rank/below_autograd.h"
#include "redistribute/redistribute.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "views/view_geometry.h"

namespace tessera::detail {
namespace {

/// Counted as a plan counts outputs: those in lists one by one. No result of a view is undefined.
at::Tensor nth_tensor(const torch::jit::Stack& results, std::size_t number) {
  std::vector<at::Tensor> tensors;
  kernels::visit_tensors(results, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors[number];
}

/// An operator without a rule runs as it would on one rank, strides included.
at::Tensor with_strides(const at::Tensor& tensor, c10::IntArrayRef strides) {
  auto result = at::empty_strided(tensor.sizes(), strides, tensor.options());
  copy_to_stride_zero(result, tensor);
  return result;
}

/// Gathers the base, takes the view again, writes to it, and redistributes the base back.
void replay_write(const DetachedView::Replay& replay, const DistributedTensorImpl& base,
                  const at::Tensor& value) {
  auto gathered = redistribute_local(base.local(), base.spec(), replay.layout);
  gathered = replay.strides ? with_strides(gathered, *replay.strides)
                            : expand_stride_zero(gathered, base.spec()->strides);
  torch::jit::Stack stack = replay.arguments;
  stack[replay.base] = gathered;
  replay.op.callBoxed(stack);
  // The view of this gathered base is a real one: the write reaches it.
  copy_to_stride_zero(nth_tensor(stack, replay.result), value);
  // The base's own strides and type; only the layout is another.
  auto spec = *base.spec();
  spec.sharding.layout = replay.layout;
  copy_to_stride_zero(base.local(), redistribute_local(gathered, intern_spec(std::move(spec)),
                                                       base.spec()->sharding.layout));
}

}  // namespace

void check_writable(const DistributedTensorImpl& impl, std::string_view what) {
  check_readable(impl, what);
  TESSERA_CHECK(!is_strict(), what,
                " writes through a view of a dimension that is split, which gathers the viewed "
                "tensor; the strict scope refuses that: redistribute it first");
  TESSERA_CHECK(
      impl.detached_view()->seen->version, what,
      " writes through a view of a dimension that is split, of an inference tensor, "
      "whose writes are not counted: redistribute it first, or use NoGradGuard instead of "
      "InferenceMode");
}

void write_through(const at::Tensor& view) {
  BelowAutograd guard;
  const auto* impl = as_distributed(view);
  auto& detached = *impl->detached_view();
  const auto* base = as_distributed(detached.base);
  if (detached.replay) {
    replay_write(*detached.replay, *base, impl->local());
  }
  // The base is a copy, too: continue with what it is a view of.
  if (base->detached_view()) {
    write_through(detached.base);
  }
  detached.note_write();
}

}  // namespace tessera::detail
