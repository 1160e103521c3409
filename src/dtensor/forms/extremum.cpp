// Largest and smallest elements where a reduced dimension is split.

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/argmin.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/tensor.h>

#include <array>
#include <limits>

#include "../below_autograd.h"
#include "form.h"
#include "identity.h"
#include "parts.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/in_order.h"

namespace tessera::detail {
namespace {

using Arguments = std::span<const c10::IValue>;
using Results = std::vector<c10::IValue>;

constexpr auto kNowhere = std::numeric_limits<std::int64_t>::max();

/// The arguments (self, dim?, keepdim).
struct Call {
  explicit Call(Arguments arguments)
      : impl(impl_of(arguments[0].toTensor())),
        spec(*impl.spec()),
        flat(arguments.size() < 2 || arguments[1].isNone()),
        keepdim(arguments.size() > 2 && arguments[2].toBool()) {
    const auto ndim = static_cast<std::int64_t>(spec.sizes.size());
    if (flat) {
      dims = all_dims(ndim);
    } else if (arguments[1].isInt()) {
      dims = {arguments[1].toInt()};
    } else {
      dims = arguments[1].toIntVector();
      if (dims.empty()) dims = all_dims(ndim);
    }
    for (auto& dim : dims) dim += dim < 0 ? ndim : 0;
  }

  const DistributedTensorImpl& impl;
  const TensorSpec& spec;
  bool flat;  ///< over all dimensions, as if there were one
  bool keepdim;
  Dims dims;
};

/// The sizes of this rank's part with those of `dims` 1.
std::vector<std::int64_t> kept_sizes(const Call& call) {
  auto sizes = call.impl.local().sizes().vec();
  for (const auto dim : call.dims) sizes[static_cast<std::size_t>(dim)] = 1;
  return sizes;
}

bool has_no_elements_along(const Call& call) {
  return std::ranges::any_of(call.dims, [&](auto dim) { return call.impl.local().size(dim) == 0; });
}

// Values alone: what has no elements gives the identity, so that nothing need be moved.

std::optional<double> bytes_of_values(const BoundCall& bound) {
  const auto* self = settled_argument(bound, 0);
  if (self == nullptr || c10::isComplexType(self->spec()->dtype)) return std::nullopt;
  const auto dims =
      named_dims(bound.call, 1, static_cast<std::int64_t>(self->spec()->sizes.size()));
  if (count_along(*self->spec(), dims) == 0) return std::nullopt;
  return 0;
}

template <bool kLargest>
at::Tensor pending_extremum(const Call& call) {
  constexpr auto kOp = kLargest ? ReduceOp::kMax : ReduceOp::kMin;
  const auto result = reduced(call.spec, call.dims, call.keepdim, kOp);
  BelowAutograd guard;
  const auto& local = call.impl.local();
  auto values = has_no_elements_along(call)
                    ? identity(kept_sizes(call), kOp, local.options())
                    : (kLargest ? local.amax(call.dims, true) : local.amin(call.dims, true));
  return make_distributed(
      values.reshape(local_sizes({call.spec.sharding.mesh, result.layout}, result.sizes)),
      {call.spec.sharding.mesh, result.layout}, result.sizes);
}

template <bool kLargest>
Results run_values(Arguments arguments) {
  return {pending_extremum<kLargest>(Call(arguments))};
}

/// aminmax(self, dim, keepdim): one is the smallest, the other the largest.
Results run_both(Arguments arguments) {
  const Call call(arguments);
  return {pending_extremum<false>(call), pending_extremum<true>(call)};
}

// With indices: each rank's best, and where it is; then the best of those.

struct Candidates {
  at::Tensor values;   ///< (parts, results) or of this rank's sizes
  at::Tensor indices;  ///< global ones
};

std::optional<double> bytes_of_candidates(const BoundCall& bound) {
  const auto* self = settled_argument(bound, 0);
  if (self == nullptr) return std::nullopt;
  const auto& spec = *self->spec();
  const auto dims = named_dims(bound.call, 1, static_cast<std::int64_t>(spec.sizes.size()));
  if (count_along(spec, dims) == 0) return std::nullopt;
  const auto parts = group_size(spec.sharding.layout, splitting(spec.sharding.layout, dims));
  const auto each = static_cast<std::int64_t>(c10::elementSize(spec.dtype) + sizeof(std::int64_t));
  return static_cast<double>((parts - 1) * local_results(spec, dims) * each);
}

std::vector<std::int64_t> indices_of(const Call& call, std::int64_t dim) {
  const auto& sharding = call.spec.sharding;
  return global_indices(*sharding.layout, static_cast<int>(dim),
                        call.spec.sizes[static_cast<std::size_t>(dim)], sharding.mesh.coordinate());
}

/// The index in the whole tensor, flattened, of position `index` of this rank's part, flattened.
std::int64_t global_flat_index(const Call& call, std::int64_t index) {
  std::int64_t result = 0, stride = 1;
  for (std::size_t dim = call.spec.sizes.size(); dim-- > 0;) {
    const auto local = call.impl.local().size(static_cast<std::int64_t>(dim));
    const auto indices = indices_of(call, static_cast<std::int64_t>(dim));
    result += indices[static_cast<std::size_t>(index % local)] * stride;
    index /= local;
    stride *= call.spec.sizes[dim];
  }
  return result;
}

template <bool kLargest>
Candidates best_of_part(const Call& call) {
  constexpr auto kOp = kLargest ? ReduceOp::kMax : ReduceOp::kMin;
  const auto& local = call.impl.local();
  const auto longs = local.options().dtype(at::kLong);
  if (has_no_elements_along(call)) {
    const auto sizes = kept_sizes(call);
    return {identity(sizes, kOp, local.options()), at::full(sizes, kNowhere, longs)};
  }
  if (call.flat) {
    const auto index = (kLargest ? local.argmax() : local.argmin());
    if (local.is_meta()) return {local.flatten().narrow(0, 0, 1), index};
    const auto place = index.template item<std::int64_t>();
    return {local.reshape({-1}).narrow(0, place, 1),
            at::full({1}, global_flat_index(call, place), longs)};
  }
  const auto dim = call.dims.front();
  const auto [values, indices] = kLargest ? local.max(dim, true) : local.min(dim, true);
  const auto global = at::tensor(indices_of(call, dim), longs.device(at::kCPU)).to(local.device());
  return {values, global.index_select(0, indices.reshape({-1})).view_as(indices)};
}

/// A copy: contiguous() leaves what has one element, or none, the strides that it has, with which
/// it cannot be viewed as another type.
at::Tensor packed_copy(const at::Tensor& tensor) {
  return tensor.clone(at::MemoryFormat::Contiguous);
}

/// The bytes of both side by side, so that one collective moves them.
Candidates gather(const Candidates& own, comm::Communicator& group) {
  const auto bytes_of = [](const at::Tensor& tensor) {
    return packed_copy(tensor).view({-1, 1}).view(at::kByte);
  };
  const auto packed = at::cat({bytes_of(own.values), bytes_of(own.indices)}, 1);
  const auto all = at::empty({group.size() * packed.numel()}, packed.options());
  if (packed.numel() > 0) in_order(group).all_gather(all, packed.view({-1}))->wait();
  const auto rows = all.view({group.size(), packed.size(0), packed.size(1)});
  const auto unpack = [&](std::int64_t first, const at::Tensor& like) {
    return packed_copy(rows.narrow(2, first, like.element_size()))
        .view(like.scalar_type())
        .squeeze(2);
  };
  return {unpack(0, own.values), unpack(own.values.element_size(), own.indices)};
}

/// Among equals, of which NaNs are some, the first in the whole tensor.
template <bool kLargest>
Candidates best_of(const Candidates& all) {
  const auto best = kLargest ? all.values.amax(0) : all.values.amin(0);
  const auto wins = all.values.eq(best).logical_or_(all.values.isnan());
  return {best, all.indices.masked_fill(wins.logical_not(), kNowhere).amin(0)};
}

template <bool kLargest>
Candidates find_best(const Call& call) {
  const auto& sharding = call.spec.sharding;
  const auto result = reduced(call.spec, call.dims, call.keepdim);
  Candidates found;
  {
    BelowAutograd guard;
    found = best_of_part<kLargest>(call);
    const auto mesh_dims = splitting(sharding.layout, call.dims);
    if (!found.values.is_meta()) {
      found = best_of<kLargest>(gather(found, sharding.mesh.group(mesh_dims)));
    }
  }
  const ShardingSpec lies{sharding.mesh, result.layout};
  const auto shape = local_sizes(lies, result.sizes);
  return {make_distributed(found.values.reshape(shape), lies, result.sizes),
          make_distributed(found.indices.reshape(shape), lies, result.sizes)};
}

template <bool kLargest>
Results run_with_indices(Arguments arguments) {
  const auto best = find_best<kLargest>(Call(arguments));
  return {best.values, best.indices};
}

template <bool kLargest>
Results run_index(Arguments arguments) {
  return {find_best<kLargest>(Call(arguments)).indices};
}

constexpr std::array kExtremumForms{
    Form{"amax", bytes_of_values, run_values<true>},
    Form{"amin", bytes_of_values, run_values<false>},
    Form{"max", bytes_of_values, run_values<true>},
    Form{"min", bytes_of_values, run_values<false>},
    Form{"aminmax", bytes_of_values, run_both},
    Form{"max.dim", bytes_of_candidates, run_with_indices<true>},
    Form{"min.dim", bytes_of_candidates, run_with_indices<false>},
    Form{"argmax", bytes_of_candidates, run_index<true>},
    Form{"argmin", bytes_of_candidates, run_index<false>},
};

}  // namespace

std::span<const Form> extremum_forms() {
  return kExtremumForms;
}

}  // namespace tessera::detail
