#include "detached_view.h"

#include <ATen/ops/empty_strided.h>

#include "below_autograd.h"
#include "distributed_impl.h"
#include "expanded.h"
#include "redistribute.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/policy.h"

namespace tessera::detail {
namespace {

/// None of an inference tensor.
std::optional<std::uint32_t> version_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) return std::nullopt;
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
  auto result = at::empty_strided(tensor.sizes(), strides, tensor.options());
  copy_to_expanded(result, tensor);
  return result;
}

/// Takes the view anew, of a gathered base, writes to it, and puts the base back.
void replay_write(const DetachedView::Replay& replay, const DistributedTensorImpl& base,
                  const at::Tensor& value) {
  auto whole = redistribute_local(base.local(), base.spec(), replay.layout);
  whole = replay.strides ? with_strides(whole, *replay.strides)
                         : expanded_as(whole, base.spec()->strides);
  torch::jit::Stack stack = replay.arguments;
  stack[replay.base] = whole;
  replay.op.callBoxed(stack);
  copy_to_expanded(nth_tensor(stack, replay.result), value);
  auto spec = *base.spec();
  spec.sharding.layout = replay.layout;
  copy_to_expanded(base.local(), redistribute_local(whole, intern_spec(std::move(spec)),
                                                    base.spec()->sharding.layout));
}

}  // namespace

bool DetachedView::is_stale() const {
  if (!base_version) return false;
  const auto now = version_of(base);
  return now != base_version && !(written && now == *base_version + 1);
}

DetachedViewPtr detached_view_of(const at::Tensor& base) {
  return std::make_shared<DetachedView>(
      DetachedView{.base = base, .base_version = version_of(base)});
}

void check_readable(const DistributedTensorImpl& impl, std::string_view what) {
  TESSERA_CHECK(!impl.detached_view() || !impl.detached_view()->is_stale(), what,
                " uses a view that had to be gathered, after the viewed tensor was written: "
                "take the view again");
}

void check_writable(const DistributedTensorImpl& impl, std::string_view what) {
  check_readable(impl, what);
  TESSERA_CHECK(!is_strict(), what,
                " writes through a view of a dimension that is split, which gathers the viewed "
                "tensor; the strict scope refuses that: redistribute it first");
  TESSERA_CHECK(
      impl.detached_view()->base_version, what,
      " writes through a view of a dimension that is split, of an inference tensor, "
      "whose writes are not counted: redistribute it first, or use NoGradGuard instead of "
      "InferenceMode");
}

DetachedViewPtr view_of_former(const DistributedTensorImpl& impl) {
  auto& view = *impl.detached_view();
  view.base_version = version_of(view.base);
  auto result = detached_view_of(
      at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(), /*allow_change=*/true)));
  view.written = result->written = true;  // so the version counts the change of sizes
  return result;
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
