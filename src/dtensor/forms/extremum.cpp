// Largest and smallest elements where a reduced dimension is sharded. Values alone are a
// Partial(max) or Partial(min), which costs nothing here. With indices, no reduction of a
// communicator works, and ranks exchange their candidates.

#include <ATen/Dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <limits>

#include "forms/form.h"
#include "forms/shard_slices.h"
#include "rank/below_autograd.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"

namespace tessera::detail {
namespace {

/// The index of a candidate that must not win: any other index is smaller.
constexpr auto kNowhere = std::numeric_limits<std::int64_t>::max();

/// The identity of a maximum or minimum of elements of type T.
template <class T>
at::Scalar identity_of(ReduceOp op) {
  // Integers have no infinity; of bool the limits are false and true.
  using Limits = std::numeric_limits<T>;
  if (op == ReduceOp::kMax) {
    return Limits::has_infinity ? T(-Limits::infinity()) : Limits::lowest();
  }
  return Limits::has_infinity ? Limits::infinity() : Limits::max();
}

/// A tensor of the identity of `op`, kMax or kMin.
at::Tensor identity(c10::IntArrayRef sizes, ReduceOp op, const at::TensorOptions& options) {
  TESSERA_CHECK(op == ReduceOp::kMax || op == ReduceOp::kMin,
                "internal: an identity of a maximum or minimum was expected");
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const auto value =
      AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, dtype, "identity",
                                 [&] { return identity_of<scalar_t>(op); });
  return at::full(sizes, value, options);
}

/// The arguments (self, dim?, keepdim).
struct ExtremumCall {
  explicit ExtremumCall(Arguments arguments)
      : impl(impl_of(arguments[0].toTensor())),
        spec(*impl.spec()),
        flat(arguments.size() < 2 || arguments[1].isNone()),
        keepdim(arguments.size() > 2 && arguments[2].toBool()),
        dims(flat ? all_dims(impl.dim()) : named_dims(arguments[1], impl.dim())) {}

  const DistributedTensorImpl& impl;
  const TensorSpec& spec;
  bool flat;  ///< over all dimensions, as if there were one
  bool keepdim;
  Dims dims;
};

/// The sizes of the local tensor, with 1 along the reduced dimensions.
std::vector<std::int64_t> kept_sizes(const ExtremumCall& call) {
  auto sizes = call.impl.local().sizes().vec();
  for (const auto dim : call.dims) {
    sizes[static_cast<std::size_t>(dim)] = 1;
  }
  return sizes;
}

/// On this rank: libtorch throws for an extremum of nothing, where another rank has elements.
bool has_no_elements_along(const ExtremumCall& call) {
  return std::ranges::any_of(call.dims, [&](auto dim) { return call.impl.local().size(dim) == 0; });
}

// Values without indices: the result is Partial. A shard without elements gives the identity, so
// that nothing has to be moved.

std::optional<double> bytes_of_values(const BoundCall& bound) {
  const auto reduction = reduction_of(bound, 1);
  if (!reduction || c10::isComplexType(reduction->spec.dtype)) {
    return std::nullopt;
  }
  return 0;
}

template <bool kLargest>
at::Tensor partial_extremum(const ExtremumCall& call) {
  constexpr auto kOp = kLargest ? ReduceOp::kMax : ReduceOp::kMin;
  const auto result = reduced_spec(call.spec, call.dims, call.keepdim, kOp);
  BelowAutograd guard;
  const auto& local = call.impl.local();
  auto values = has_no_elements_along(call)
                    ? identity(kept_sizes(call), kOp, local.options())
                    : (kLargest ? local.amax(call.dims, true) : local.amin(call.dims, true));
  return make_distributed(
      // Reduced with keepdim, which the result need not have: the sizes are the layout's.
      values.reshape(local_sizes({call.spec.sharding.mesh, result.layout}, result.sizes)),
      {call.spec.sharding.mesh, result.layout}, result.sizes);
}

template <bool kLargest>
Results run_values(Arguments arguments) {
  return {partial_extremum<kLargest>(ExtremumCall(arguments))};
}

/// aminmax(self, dim, keepdim): one is the smallest, the other the largest.
Results run_both(Arguments arguments) {
  const ExtremumCall call(arguments);
  return {partial_extremum<false>(call), partial_extremum<true>(call)};
}

// With indices: every rank finds its best value and its index; these candidates are gathered, and
// the best of them is the result.

struct Candidates {
  at::Tensor values;   ///< in this rank's sizes; gathered: (ranks, results)
  at::Tensor indices;  ///< global
};

std::optional<double> bytes_of_candidates(const BoundCall& bound) {
  const auto reduction = reduction_of(bound, 1);
  if (!reduction) {
    return std::nullopt;
  }
  const auto& [spec, dims] = *reduction;
  // An all-gather: each rank's candidates go to all others.
  const auto ranks =
      group_size(spec.sharding.layout, sharding_mesh_dims(spec.sharding.layout, dims));
  const auto each = static_cast<std::int64_t>(c10::elementSize(spec.dtype) + sizeof(std::int64_t));
  return static_cast<double>((ranks - 1) * most_local_results(spec, dims) * each);
}

std::vector<std::int64_t> indices_of(const ExtremumCall& call, std::int64_t dim) {
  const auto& sharding = call.spec.sharding;
  return global_indices(*sharding.layout, static_cast<int>(dim),
                        call.spec.sizes[static_cast<std::size_t>(dim)], sharding.mesh.coordinate());
}

/// The flat index in the global tensor of flat index `index` in the local one.
std::int64_t global_flat_index(const ExtremumCall& call, std::int64_t index) {
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
Candidates best_of_shard(const ExtremumCall& call) {
  constexpr auto kOp = kLargest ? ReduceOp::kMax : ReduceOp::kMin;
  const auto& local = call.impl.local();
  const auto longs = local.options().dtype(at::kLong);
  if (has_no_elements_along(call)) {
    const auto sizes = kept_sizes(call);
    return {identity(sizes, kOp, local.options()), at::full(sizes, kNowhere, longs)};
  }
  if (call.flat) {
    const auto index = (kLargest ? local.argmax() : local.argmin());
    // Tensors of the right sizes and types; nothing will read them.
    if (local.is_meta()) {
      return {local.flatten().narrow(0, 0, 1), index};
    }
    // Only the host can translate the index: on a GPU this waits for the device.
    const auto position = index.template item<std::int64_t>();
    return {local.reshape({-1}).narrow(0, position, 1),
            at::full({1}, global_flat_index(call, position), longs)};
  }
  const auto dim = call.dims.front();
  const auto [values, indices] = kLargest ? local.max(dim, true) : local.min(dim, true);
  // A table instead of an offset, since a shard need not be one range (Digit).
  const auto global = at::tensor(indices_of(call, dim), longs.device(at::kCPU)).to(local.device());
  return {values, global.index_select(0, indices.reshape({-1})).view_as(indices)};
}

/// A contiguous copy. (contiguous() leaves a tensor of at most one element its strides, with which
/// it may not be viewed as another type.)
at::Tensor packed_copy(const at::Tensor& tensor) {
  return tensor.clone(at::MemoryFormat::Contiguous);
}

/// All ranks' candidates. Bytes of values and indices travel side by side, in one collective.
Candidates gather(const Candidates& own, comm::Communicator& group) {
  const auto bytes_of = [](const at::Tensor& tensor) {
    return packed_copy(tensor).view({-1, 1}).view(at::kByte);
  };
  const auto packed = at::cat({bytes_of(own.values), bytes_of(own.indices)}, 1);
  const auto all = at::empty({group.size() * packed.numel()}, packed.options());
  if (packed.numel() > 0) {
    flush_pending_transfers(group).all_gather(all, packed.view({-1}))->wait();
  }
  const auto rows = all.view({group.size(), packed.size(0), packed.size(1)});
  const auto unpack = [&](std::int64_t first, const at::Tensor& like) {
    return packed_copy(rows.narrow(2, first, like.element_size()))
        .view(like.scalar_type())
        .squeeze(2);
  };
  return {unpack(0, own.values), unpack(own.values.element_size(), own.indices)};
}

/// The best candidate; among equal ones, and among NaNs, the one with the lowest global index.
template <bool kLargest>
Candidates best_of(const Candidates& all) {
  // amax and amin give NaN where there is one; a NaN is not itself.
  const auto best = kLargest ? all.values.amax(0) : all.values.amin(0);
  const auto wins = all.values.eq(best).logical_or_(all.values.ne(all.values));
  return {best, all.indices.masked_fill(wins.logical_not(), kNowhere).amin(0)};
}

template <bool kLargest>
Candidates find_best(const ExtremumCall& call) {
  const auto& sharding = call.spec.sharding;
  const auto result = reduced_spec(call.spec, call.dims, call.keepdim);
  Candidates found;
  {
    BelowAutograd guard;
    found = best_of_shard<kLargest>(call);
    // The ranks that share out the reduced dimensions; others have other results.
    const auto mesh_dims = sharding_mesh_dims(sharding.layout, call.dims);
    found = best_of<kLargest>(gather(found, sharding.mesh.group(mesh_dims)));
  }
  const ShardingSpec of_result{sharding.mesh, result.layout};
  const auto shape = local_sizes(of_result, result.sizes);
  return {make_distributed(found.values.reshape(shape), of_result, result.sizes),
          make_distributed(found.indices.reshape(shape), of_result, result.sizes)};
}

template <bool kLargest>
Results run_with_indices(Arguments arguments) {
  const auto best = find_best<kLargest>(ExtremumCall(arguments));
  return {best.values, best.indices};
}

template <bool kLargest>
Results run_extremum_index(Arguments arguments) {
  return {find_best<kLargest>(ExtremumCall(arguments)).indices};
}

const AddedForms kExtremumForms{
    {"amax", bytes_of_values, run_values<true>},
    {"amin", bytes_of_values, run_values<false>},
    {"max", bytes_of_values, run_values<true>},
    {"min", bytes_of_values, run_values<false>},
    {"aminmax", bytes_of_values, run_both},
    {"max.dim", bytes_of_candidates, run_with_indices<true>},
    {"min.dim", bytes_of_candidates, run_with_indices<false>},
    {"argmax", bytes_of_candidates, run_extremum_index<true>},
    {"argmin", bytes_of_candidates, run_extremum_index<false>},
};

}  // namespace

}  // namespace tessera::detail
