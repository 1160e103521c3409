#include <ATen/ops/empty_strided.h>

#include <utility>
#include <vector>

#include "rank/rank.h"
#include "redistribute/redistribute.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "views/views.h"

namespace tessera::detail {

// Strides and storage offsets. A TensorSpec has global strides, and the local tensor has other
// strides. Operators that read memory by stride, such as as_strided, need corresponding local
// strides.

namespace {

at::Tensor meta_like(const at::Tensor& tensor) {
  return meta_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

}  // namespace

void add_global_sizes(c10::Error& error, const at::Tensor& tensor) {
  error.add_context(concat("the sizes of a distributed tensor and of its views are global, here ",
                           tensor.sizes()));
}

std::optional<std::vector<std::vector<std::int64_t>>> view_strides(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(kernels::with_tensors(argument, meta_like));
  }
  try {
    BelowAutograd guard;
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;  // the operator has no kernel for meta tensors
  } catch (c10::Error& error) {
    kernels::visit_tensors(arguments.first(1),
                           [&](const at::Tensor& tensor) { add_global_sizes(error, tensor); });
    throw;
  }
  std::vector<std::vector<std::int64_t>> strides;
  kernels::visit_tensors(
      stack, [&](const at::Tensor& tensor) { strides.push_back(tensor.strides().vec()); });
  return strides;
}

at::Tensor viewable(const at::Tensor& local, at::IntArrayRef sizes) {
  return strides_of_view(local, sizes) ? local : local.contiguous();
}

bool has_stride_zero(const at::Tensor& tensor) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      return true;
    }
  }
  return false;
}

at::Tensor narrow_stride_zero(at::Tensor tensor, at::IntArrayRef strides) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (strides[static_cast<std::size_t>(dim)] == 0 && tensor.size(dim) > 1) {
      tensor = tensor.narrow(dim, 0, 1);
    }
  }
  return tensor;
}

at::Tensor expand_stride_zero(const at::Tensor& tensor, at::IntArrayRef strides) {
  return narrow_stride_zero(tensor, strides).expand(tensor.sizes());
}

void copy_to_stride_zero(const at::Tensor& to, const at::Tensor& value) {
  narrow_stride_zero(to, to.strides()).copy_(narrow_stride_zero(value, to.strides()));
}

// Writes to detached views (DetachedView), which have their own copy of the base's elements.
// write_through() repeats a write to the view on the base.

namespace {

at::Tensor nth_tensor(const torch::jit::Stack& results, std::size_t number) {
  std::vector<at::Tensor> tensors;
  kernels::visit_tensors(results, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors[number];
}

/// Returns a copy of `tensor` with `strides`. An operator without a sharding rule must get the
/// strides that the tensor would have on a single rank.
at::Tensor with_strides(const at::Tensor& tensor, c10::IntArrayRef strides) {
  auto result = at::empty_strided(tensor.sizes(), strides, tensor.options());
  copy_to_stride_zero(result, tensor);
  return result;
}

/// Writes `value` to a view of `base`: gathers the base, makes the view of the gathered base,
/// writes the view, and redistributes the gathered base to its old layout.
void replay_write(const DetachedView::Replay& replay, const DistributedTensorImpl& base,
                  const at::Tensor& value) {
  auto gathered = redistribute_local(base.local(), base.spec(), replay.layout);
  gathered = replay.strides ? with_strides(gathered, *replay.strides)
                            : expand_stride_zero(gathered, base.spec()->strides);
  torch::jit::Stack stack = replay.arguments;
  stack[replay.base] = gathered;
  replay.op.callBoxed(stack);
  // The write also changes `gathered`, because the written view shares memory with `gathered`.
  copy_to_stride_zero(nth_tensor(stack, replay.result), value);
  auto spec = *base.spec();
  spec.sharding.layout = replay.layout;
  copy_to_stride_zero(base.local(), redistribute_local(gathered, intern_spec(std::move(spec)),
                                                       base.spec()->sharding.layout));
}

}  // namespace

void check_writable(const DistributedTensorImpl& impl, std::string_view what) {
  check_readable(impl, what);
  TESSERA_CHECK(!is_strict(), what,
                " writes through a view of a split dimension, but the strict scope refuses to "
                "gather the viewed tensor; redistribute the viewed tensor first");
  TESSERA_CHECK(impl.detached_view()->seen->version, what,
                " writes through a view of a split dimension of an inference tensor, but libtorch "
                "does not count writes to inference tensors; redistribute the viewed tensor first, "
                "or use NoGradGuard instead of InferenceMode");
}

void write_through(const at::Tensor& view) {
  BelowAutograd guard;
  const auto* impl = as_distributed(view);
  auto& detached = *impl->detached_view();
  const auto* base = as_distributed(detached.base);
  if (detached.replay) {
    replay_write(*detached.replay, *base, impl->local());
  }
  // If the base is a detached view too, the write is also repeated on the base of the base.
  if (base->detached_view()) {
    write_through(detached.base);
  }
  detached.note_write();
}

}  // namespace tessera::detail
