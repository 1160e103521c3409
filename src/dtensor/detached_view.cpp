#include "detached_view.h"

#include <ATen/ops/empty_strided.h>

#include "below_autograd.h"
#include "distributed_impl.h"
#include "redistribute.h"

namespace tessera::detail {
namespace {

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

at::Tensor nth_tensor(const torch::jit::Stack& results, std::size_t number) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : results) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const auto& tensor : value.toTensorVector()) tensors.push_back(tensor);
  }
  return tensors[number];
}

at::Tensor with_strides(const at::Tensor& tensor, c10::IntArrayRef strides) {
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

/// Takes the view anew, of a gathered base, writes to it, and puts the base back.
void replay_write(const DetachedView::Replay& replay, const DistributedTensorImpl& base,
                  const at::Tensor& value) {
  auto whole = redistribute_local(base.local(), base.spec(), replay.layout);
  if (replay.strides) whole = with_strides(whole, *replay.strides);
  torch::jit::Stack stack = replay.arguments;
  stack[replay.base] = whole;
  replay.op.callBoxed(stack);
  nth_tensor(stack, replay.result).copy_(value);
  auto spec = *base.spec();
  spec.sharding.layout = replay.layout;
  base.local().copy_(
      redistribute_local(whole, intern_spec(std::move(spec)), base.spec()->sharding.layout));
}

}  // namespace

bool DetachedView::is_stale() const {
  const auto now = version_of(base);
  return now != base_version && !(written && now == base_version + 1);
}

void write_through(const at::Tensor& view) {
  BelowAutograd guard;
  const auto* impl = as_distributed(view);
  auto& detached = *impl->detached_view();
  const auto* base = as_distributed(detached.base);
  if (detached.replay) replay_write(*detached.replay, *base, impl->local());
  if (base->detached_view()) write_through(detached.base);
  detached.base_version = version_of(detached.base);
  detached.written = true;
}

}  // namespace tessera::detail
