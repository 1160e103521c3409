// Views of what is split along a dimension that the view takes apart or joins. The viewed tensor
// has to be gathered first, so that the view holds a copy; here that copy is kept true. To read the
// view after its base was written is an error, and a write to the view is repeated on its base, by
// taking the view once more. execute/wrap_results.cpp makes these views; whoever writes to one
// calls write_through.

#include "views/detached_view.h"

#include <ATen/ops/empty_strided.h>

#include "redistribute/redistribute.h"
#include "tensor/below_autograd.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/alias_tensor.h"
#include "tessera/internals/detail/version_counter.h"
#include "views/view_geometry.h"

namespace tessera::detail {
namespace {

/// nullopt for an inference tensor, which has no version counter.
std::optional<std::uint32_t> version_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) {
    return std::nullopt;
  }
  return writes_of(tensor);
}

/// Counted as a plan counts outputs: those in lists one by one.
at::Tensor nth_tensor(const torch::jit::Stack& results, std::size_t number) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : results) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    }
    if (!value.isTensorList()) {
      continue;
    }
    for (const auto& tensor : value.toTensorVector()) {
      tensors.push_back(tensor);
    }
  }
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

bool DetachedView::is_stale() const {
  if (!seen->version) {
    return false;
  }
  // A write through the view bumps the version of the view as well. Where the two share a counter,
  // as views of one tensor do, that comes on top of the version that write_through noted.
  const auto now = version_of(base);
  return now != seen->version && !(seen->written && now == *seen->version + 1);
}

DetachedViewPtr detached_view_of(const at::Tensor& base) {
  return std::make_shared<DetachedView>(DetachedView{
      .base = base,
      .seen = std::make_shared<DetachedView::Seen>(DetachedView::Seen{version_of(base)})});
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
      impl.detached_view()->seen->version, what,
      " writes through a view of a dimension that is split, of an inference tensor, "
      "whose writes are not counted: redistribute it first, or use NoGradGuard instead of "
      "InferenceMode");
}

DetachedViewPtr view_of_former(const DistributedTensorImpl& impl) {
  auto& view = *impl.detached_view();
  view.seen->version = version_of(view.base);
  auto result = detached_view_of(alias_tensor(impl, /*allows_change=*/true));
  // The change of sizes bumps the version of both, which must not make them stale.
  view.seen->written = result->seen->written = true;
  return result;
}

void write_through(const at::Tensor& view) {
  BelowAutograd guard;
  const auto* impl = as_distributed(view);
  auto& detached = *impl->detached_view();
  const auto* base = as_distributed(detached.base);
  if (detached.replay) {
    replay_write(*detached.replay, *base, impl->local());
  }
  // The base is a copy, too: on to what that is a view of.
  if (base->detached_view()) {
    write_through(detached.base);
  }
  *detached.seen = {version_of(detached.base), /*written=*/true};
}

}  // namespace tessera::detail
