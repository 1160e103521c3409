#include "parts.h"

#include <ATen/ops/stack.h>

#include <algorithm>
#include <numeric>

#include "../autograd_functions.h"
#include "../redistribute.h"
#include "tessera/core/layout_math.h"

namespace tessera::detail {
namespace {

bool contains(const Dims& dims, std::int64_t dim) {
  return std::ranges::find(dims, dim) != dims.end();
}

}  // namespace

const DistributedTensorImpl* settled_argument(const BoundCall& call, std::size_t arg) {
  if (!call.call.has_tensor(arg)) return nullptr;
  const auto index = static_cast<std::size_t>(call.call.tensor_index(arg));
  const auto* impl = as_distributed(call.tensors[index]);
  return impl != nullptr && !impl->spec()->sharding.layout->is_partial() ? impl : nullptr;
}

const DistributedTensorImpl& impl_of(const at::Tensor& tensor) {
  return *as_distributed(tensor);
}

Dims all_dims(std::int64_t ndim) {
  Dims dims(static_cast<std::size_t>(ndim));
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

Dims named_dims(const OpCall& call, std::size_t arg, std::int64_t ndim) {
  auto dims = call.integers(arg);
  if (dims.empty()) return all_dims(ndim);
  for (auto& dim : dims) dim += dim < 0 ? ndim : 0;
  std::ranges::sort(dims);
  return dims;
}

std::vector<int> splitting(LayoutPtr layout, const Dims& dims) {
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

std::int64_t count_along(const TensorSpec& spec, const Dims& dims) {
  std::int64_t count = 1;
  for (const auto dim : dims) count *= spec.sizes[static_cast<std::size_t>(dim)];
  return count;
}

std::int64_t local_results(const TensorSpec& spec, const Dims& dims) {
  const auto layout = spec.sharding.layout;
  // The first coordinate has the largest part.
  const std::vector<std::int64_t> first(layout->mesh_sizes().size(), 0);
  const auto sizes = local_sizes(*layout, spec.sizes, first);
  std::int64_t count = 1;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (!contains(dims, static_cast<std::int64_t>(dim))) count *= sizes[dim];
  }
  return count;
}

double all_reduce_bytes(const TensorSpec& spec, const Dims& dims, double elements) {
  const auto layout = spec.sharding.layout;
  const auto parts = static_cast<double>(group_size(layout, splitting(layout, dims)));
  return 2 * elements * static_cast<double>(c10::elementSize(spec.dtype)) * (parts - 1) / parts;
}

Reduced reduced(const TensorSpec& spec, const Dims& dims, bool keepdim,
                std::optional<ReduceOp> partial) {
  const auto layout = spec.sharding.layout;
  Reduced result;
  Layout::Dims digits;
  for (std::size_t dim = 0; dim < spec.sizes.size(); ++dim) {
    const bool gone = contains(dims, static_cast<std::int64_t>(dim));
    if (gone && !keepdim) continue;
    result.sizes.push_back(gone ? 1 : spec.sizes[dim]);
    digits.push_back(gone ? std::vector<Digit>{} : layout->dims()[dim]);
  }
  std::vector<PartialDim> pending;
  if (partial) {
    for (const int m : splitting(layout, dims)) pending.push_back({m, *partial});
  }
  result.layout = Layout::intern(layout->mesh_sizes(), std::move(digits), std::move(pending));
  return result;
}

at::Tensor settled(const at::Tensor& tensor) {
  const auto& impl = impl_of(tensor);
  const auto& spec = impl.spec();
  const auto target = gradient_layout(spec->sharding.layout);
  if (target == spec->sharding.layout) return tensor;
  return make_distributed(redistribute_local(impl.local(), spec, target),
                          {spec->sharding.mesh, target}, spec->sizes);
}

std::vector<at::Tensor> settled_together(const std::vector<at::Tensor>& tensors) {
  return settled(at::stack(tensors)).unbind();
}

}  // namespace tessera::detail
