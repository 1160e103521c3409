#include <ATen/ops/stack.h>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/iota.hpp>

#include <algorithm>
#include <numeric>

#include "lowerings/lowering.h"
#include "redistribute/redistribute.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/dtensor/detail/make_distributed.h"

namespace tessera::detail {

// The table of lowerings (alternative implementations). The other source files of this folder, and
// some of fused/, define them.

namespace {

constexpr std::string_view kAtenPrefix = "aten::";

/// The table of all lowerings. Addresses of its elements do not change when lowerings are added.
Lowerings& lowerings() {
  static Lowerings by_name;
  return by_name;
}

}  // namespace

AddedLowerings::AddedLowerings(std::initializer_list<Lowering> added) {
  for (const Lowering& lowering : added) {
    lowerings().emplace(lowering.name, lowering);
  }
}

const Lowerings& all_lowerings() {
  return lowerings();
}

const Lowering* lowering_of(const OperatorInfo& info) {
  std::string_view name = info.name;
  if (name.starts_with(kAtenPrefix)) {
    name.remove_prefix(kAtenPrefix.size());
  }
  const auto found = lowerings().find(name);
  return found == lowerings().end() ? nullptr : &found->second;
}

// Helpers of the lowerings (alternative implementations of operators). Byte counts decide between a
// lowering and the sharding rule. Each count is the maximum that one rank sends.

namespace {

bool contains(const Dims& dims, std::int64_t dim) {
  return std::ranges::find(dims, dim) != dims.end();
}

Dims completed(Dims dims, std::int64_t ndim) {
  if (dims.empty()) {
    return all_dims(ndim);
  }
  for (auto& dim : dims) {
    dim += dim < 0 ? ndim : 0;
  }
  std::ranges::sort(dims);
  return dims;
}

}  // namespace

const DistributedTensorImpl* non_partial_argument(const BoundCall& call, std::size_t arg) {
  if (!call.call.has_tensor(arg)) {
    return nullptr;
  }
  const auto index = static_cast<std::size_t>(call.call.tensor_index(arg));
  const auto* impl = as_distributed(call.tensors[index]);
  // A Partial tensor is excluded: its elements are unknown before it is reduced, and the sharding
  // rule handles such a tensor.
  return impl != nullptr && !impl->spec()->sharding.layout->is_partial() ? impl : nullptr;
}

const DistributedTensorImpl& impl_of(const at::Tensor& tensor) {
  return *as_distributed(tensor);
}

Dims all_dims(std::int64_t ndim) {
  return ranges::views::iota(std::int64_t{0}, ndim) | ranges::to<Dims>();
}

Dims named_dims(const OpCall& call, std::size_t arg, std::int64_t ndim) {
  return completed(call.integers(arg), ndim);
}

Dims named_dims(const c10::IValue& argument, std::int64_t ndim) {
  if (argument.isNone()) {
    return all_dims(ndim);
  }
  return completed(argument.isInt() ? Dims{argument.toInt()} : argument.toIntVector(), ndim);
}

std::vector<int> sharding_mesh_dims(LayoutPtr layout, const Dims& dims) {
  std::vector<int> result;
  for (const auto dim : dims) {
    const auto own = layout->mesh_dims_of(static_cast<int>(dim));
    result.insert(result.end(), own.begin(), own.end());
  }
  return result;
}

std::int64_t group_size(LayoutPtr layout, const std::vector<int>& mesh_dims) {
  return std::accumulate(mesh_dims.begin(), mesh_dims.end(), std::int64_t{1},
                         [&](std::int64_t size, int m) {
                           return size * layout->mesh_sizes()[static_cast<std::size_t>(m)];
                         });
}

std::optional<Reduction> reduction_of(const BoundCall& call, int dims) {
  const auto* self = non_partial_argument(call, 0);
  if (self == nullptr) {
    return std::nullopt;
  }
  const auto& spec = *self->spec();
  const auto ndim = static_cast<std::int64_t>(spec.sizes.size());
  Reduction reduction{spec, dims < 0 ? all_dims(ndim)
                                     : named_dims(call.call, static_cast<std::size_t>(dims), ndim)};
  const bool empty = std::ranges::any_of(reduction.dims, [&](std::int64_t dim) {
    return spec.sizes[static_cast<std::size_t>(dim)] == 0;
  });
  return empty ? std::nullopt : std::optional(std::move(reduction));
}

std::int64_t most_local_results(const TensorSpec& spec, const Dims& dims) {
  const auto layout = spec.sharding.layout;
  const std::vector<std::int64_t> first(layout->mesh_sizes().size(), 0);
  const auto sizes = local_sizes(*layout, spec.sizes, first);
  std::int64_t count = 1;
  for (const auto& [dim, size] : ranges::views::enumerate(sizes)) {
    if (!contains(dims, static_cast<std::int64_t>(dim))) {
      count *= size;
    }
  }
  return count;
}

double all_reduce_bytes(const TensorSpec& spec, const Dims& dims, double elements) {
  const auto layout = spec.sharding.layout;
  const auto ranks = static_cast<double>(group_size(layout, sharding_mesh_dims(layout, dims)));
  // An all-reduce counts as a reduce-scatter and an all-gather.
  return 2 * elements * static_cast<double>(c10::elementSize(spec.dtype)) * (ranks - 1) / ranks;
}

ReducedSpec reduced_spec(const TensorSpec& spec, const Dims& dims, bool keepdim,
                         std::optional<ReduceOp> partial) {
  const auto layout = spec.sharding.layout;
  ReducedSpec result;
  Layout::Dims digits;
  for (std::size_t dim = 0; dim < spec.sizes.size(); ++dim) {
    const bool gone = contains(dims, static_cast<std::int64_t>(dim));
    if (gone && !keepdim) {
      continue;
    }
    result.sizes.push_back(gone ? 1 : spec.sizes[dim]);
    digits.push_back(gone ? std::vector<Digit>{} : layout->dims()[dim]);
  }
  std::vector<PartialDim> partials;
  if (partial) {
    for (const int m : sharding_mesh_dims(layout, dims)) {
      partials.push_back({m, *partial});
    }
  }
  result.layout = Layout::intern(layout->mesh_sizes(), std::move(digits), std::move(partials));
  return result;
}

at::Tensor reduce_partial(const at::Tensor& tensor) {
  const auto& impl = impl_of(tensor);
  const auto& spec = impl.spec();
  const auto target = gradient_layout(spec->sharding.layout);
  if (target == spec->sharding.layout) {
    return tensor;
  }
  return make_distributed(redistribute_local(impl.local(), spec, target),
                          {spec->sharding.mesh, target}, spec->sizes);
}

std::vector<at::Tensor> reduce_partials_together(const std::vector<at::Tensor>& tensors) {
  // Stacks the tensors along a new dimension, which is not sharded, so that their layouts do not
  // change.
  return reduce_partial(at::stack(tensors)).unbind();
}

}  // namespace tessera::detail
