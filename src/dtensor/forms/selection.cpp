// Operators whose result depends on values that every rank has, or that ranks compare
// independently.

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index.h>

#include "forms/form.h"
#include "forms/shard_slices.h"
#include "rank/below_autograd.h"
#include "redistribute/redistribute.h"
#include "tessera/comm/communicator.h"

namespace tessera::detail {
namespace {

/// A plain tensor among distributed ones counts as replicated; check_policy refuses it where the
/// program has not allowed that.
bool is_replicated(const at::Tensor& tensor) {
  const auto* impl = as_distributed(tensor);
  return impl == nullptr || impl->spec()->sharding.layout->is_replicated();
}

// self[masks and indices], where these are replicated and the indexed dimensions are not sharded.

/// The dimensions of self that the indices take: a mask takes as many as it has.
Dims indexed_dims(std::span<const std::optional<at::Tensor>> indices) {
  Dims dims;
  std::int64_t dim = 0;
  for (const auto& index : indices) {
    const bool given = index && index->defined();
    const bool mask =
        given && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
    const std::int64_t taken = mask ? index->dim() : 1;
    for (std::int64_t i = 0; given && i < taken; ++i) {
      dims.push_back(dim + i);
    }
    dim += taken;
  }
  return dims;
}

std::vector<std::optional<at::Tensor>> indices_of(const BoundCall& bound) {
  std::vector<std::optional<at::Tensor>> indices;
  for (const auto ref : bound.call.tensor_list(1)) {
    indices.push_back(ref.index < 0
                          ? std::nullopt
                          : std::optional(bound.tensors[static_cast<std::size_t>(ref.index)]));
  }
  return indices;
}

std::optional<double> bytes_of_index(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  // How much a mask selects is in its values, which a meta tensor lacks.
  if (self == nullptr || self->local().is_meta()) {
    return std::nullopt;
  }
  const auto indices = indices_of(bound);
  for (const auto& index : indices) {
    if (index && !is_replicated(*index)) {
      return std::nullopt;
    }
  }
  const auto dims = indexed_dims(indices);
  if (dims.empty() || dims.back() >= self->dim()) {
    return std::nullopt;
  }
  // Dimensions that are not indexed may be sharded: indexing acts on each of their positions alike.
  if (!sharding_mesh_dims(self->spec()->sharding.layout, dims).empty()) {
    return std::nullopt;
  }
  return 0;
}

/// Where the result has the dimensions of the indices: in place of the indexed ones if those are
/// adjacent, else in front.
std::size_t position_of_indices(const Dims& indexed) {
  const bool adjacent =
      indexed.back() - indexed.front() + 1 == static_cast<std::int64_t>(indexed.size());
  return adjacent ? static_cast<std::size_t>(indexed.front()) : 0;
}

/// index.Tensor(self, indices)
Results run_index(Arguments arguments) {
  const auto& impl = impl_of(arguments[0].toTensor());
  c10::List<std::optional<at::Tensor>> locals;
  std::vector<std::optional<at::Tensor>> indices;
  for (const auto& element : arguments[1].toListRef()) {
    indices.push_back(element.toOptional<at::Tensor>());
    locals.push_back(indices.back() ? std::optional(local_tensor(*indices.back())) : std::nullopt);
  }
  const auto dims = indexed_dims(indices);
  const auto& spec = *impl.spec();
  auto result = reduced_spec(spec, dims, false);
  at::Tensor local;
  {
    BelowAutograd guard;
    local = at::index(impl.local(), locals);
  }
  auto digits = result.layout->dims();
  const auto position = static_cast<std::ptrdiff_t>(position_of_indices(dims));
  // A mask becomes one dimension, and indices the dimensions of their broadcast. Their number and
  // sizes are read off the local result, which is whole along these dimensions.
  const auto added = static_cast<std::size_t>(local.dim()) - digits.size();
  digits.insert(digits.begin() + position, added, {});
  for (std::size_t i = 0; i < added; ++i) {
    const auto at = position + static_cast<std::ptrdiff_t>(i);
    result.sizes.insert(result.sizes.begin() + at, local.size(at));
  }
  const auto layout = Layout::intern(result.layout->mesh_sizes(), std::move(digits));
  return {make_distributed(local, {spec.sharding.mesh, layout}, result.sizes)};
}

// equal(self, other), where both have one layout: each rank compares its shard.

std::optional<double> bytes_of_equal(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  const auto* other = non_partial_argument(bound, 1);
  if (self == nullptr || other == nullptr || self->local().is_meta()) {
    return std::nullopt;
  }
  // Specs are interned, but two may differ in strides, which equal() ignores: compare the parts.
  const bool alike = self->spec()->sharding == other->spec()->sharding &&
                     self->spec()->sizes == other->spec()->sizes;
  if (!alike) {
    return std::nullopt;
  }
  return all_reduce_bytes(*self->spec(), all_dims(self->dim()), 1);
}

Results run_equal(Arguments arguments) {
  const auto& self = impl_of(arguments[0].toTensor());
  const auto& other = impl_of(arguments[1].toTensor());
  const auto& spec = *self.spec();
  const auto result = reduced_spec(spec, all_dims(self.dim()), false, ReduceOp::kMin);
  at::Tensor local;
  {
    BelowAutograd guard;
    local = at::full({}, at::equal(self.local(), other.local()),
                     at::TensorOptions(at::kByte).device(self.local().device()));
  }
  const auto verdict =
      reduce_partial(make_distributed(local, {spec.sharding.mesh, result.layout}, result.sizes));
  // The host reads it: on a GPU this waits for the device.
  return {local_tensor(verdict).item<bool>()};
}

const AddedForms kSelectionForms{
    {"index.Tensor", bytes_of_index, run_index},
    {"equal", bytes_of_equal, run_equal},
};

}  // namespace

}  // namespace tessera::detail
