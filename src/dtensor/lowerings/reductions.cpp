// Lowerings of reductions, of means of losses, and of equal().

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg__powsum.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lowerings/lowering.h"
#include "rank/rank.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/detail/transfers.h"

namespace tessera::detail {

// Maxima and minima over a sharded dimension. Without indices, the result is Partial(max) or
// Partial(min), without communication here. With indices, communicators have no suitable reduction,
// so ranks exchange their candidates: each rank's best value and its index.

namespace {

/// The index of a candidate that must not be selected. Every real index is smaller.
constexpr auto kNowhere = std::numeric_limits<std::int64_t>::max();

/// The initial value of a maximum or minimum over elements of type T: it never replaces an element.
template <class T>
at::Scalar identity_of(ReduceOp op) {
  // Integers have no infinity, so their smallest or largest value is used. For bool, false and true
  // are used.
  using Limits = std::numeric_limits<T>;
  if (op == ReduceOp::kMax) {
    return Limits::has_infinity ? T(-Limits::infinity()) : Limits::lowest();
  }
  return Limits::has_infinity ? Limits::infinity() : Limits::max();
}

at::Tensor identity(c10::IntArrayRef sizes, ReduceOp op, const at::TensorOptions& options) {
  TESSERA_CHECK(op == ReduceOp::kMax || op == ReduceOp::kMin,
                "internal: an identity of a maximum or minimum was expected");
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const auto value =
      AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, dtype, "identity",
                                 [&] { return identity_of<scalar_t>(op); });
  return at::full(sizes, value, options);
}

/// An argmax-like or max-like call with the arguments (self, dim?, keepdim).
struct ExtremumCall {
  explicit ExtremumCall(Arguments arguments)
      : impl(impl_of(arguments[0].toTensor())),
        spec(*impl.spec()),
        flat(arguments.size() < 2 || arguments[1].isNone()),
        keepdim(arguments.size() > 2 && arguments[2].toBool()),
        dims(flat ? all_dims(impl.dim()) : named_dims(arguments[1], impl.dim())) {}

  const DistributedTensorImpl& impl;
  const TensorSpec& spec;
  bool flat;  ///< whether all dimensions are reduced, as if the tensor were a vector
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

/// Whether this shard has no elements along a reduced dimension. libtorch would throw, although
/// other ranks may have elements.
bool has_no_elements_along(const ExtremumCall& call) {
  return std::ranges::any_of(call.dims, [&](auto dim) { return call.impl.local().size(dim) == 0; });
}

// Maxima and minima without indices: the result is Partial. An empty shard contributes a value that
// changes no maximum or minimum.

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
      // In `values` the reduced dimensions have size 1, but the result may lack these dimensions.
      values.reshape(local_sizes({call.spec.sharding.mesh, result.layout}, result.sizes)),
      {call.spec.sharding.mesh, result.layout}, result.sizes);
}

template <bool kLargest>
Results run_values(Arguments arguments) {
  return {partial_extremum<kLargest>(ExtremumCall(arguments))};
}

// Maxima and minima with indices: each rank's best value and its index are gathered and compared.

struct Candidates {
  at::Tensor values;   ///< this rank's best values; after gather() all ranks': (ranks, results)
  at::Tensor indices;  ///< indices of the values in the global tensor
};

std::optional<double> bytes_of_candidates(const BoundCall& bound) {
  const auto reduction = reduction_of(bound, 1);
  if (!reduction) {
    return std::nullopt;
  }
  const auto& [spec, dims] = *reduction;
  // An all-gather sends each rank's candidates to all other ranks.
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

/// The flat index in the global tensor of the element with flat index `index` in the local tensor.
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
    // For meta tensors, returns tensors of the right sizes and types without values.
    if (local.is_meta()) {
      return {local.flatten().narrow(0, 0, 1), index};
    }
    // item() reads the local index from the device; on a GPU the host waits for the device.
    const auto position = index.template item<std::int64_t>();
    return {local.reshape({-1}).narrow(0, position, 1),
            at::full({1}, global_flat_index(call, position), longs)};
  }
  const auto dim = call.dims.front();
  const auto [values, indices] = kLargest ? local.max(dim, true) : local.min(dim, true);
  // A table of global indices instead of one offset, because a shard may consist of several ranges.
  const auto global = at::tensor(indices_of(call, dim), longs.device(at::kCPU)).to(local.device());
  return {values, global.index_select(0, indices.reshape({-1})).view_as(indices)};
}

/// Returns a contiguous copy. contiguous() would not change the strides of a tensor with at most
/// one element, and such strides may not permit a view as another type.
at::Tensor packed_copy(const at::Tensor& tensor) {
  return tensor.clone(at::MemoryFormat::Contiguous);
}

/// Gathers all ranks' candidates. Values and indices are sent together, in one collective.
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

/// Selects the best of all ranks' candidates. Of several equal values or NaNs, selects the one with
/// the lowest global index.
template <bool kLargest>
Candidates best_of(const Candidates& all) {
  // amax and amin return NaN if any value is NaN. Such a result needs isnan(), because a NaN is not
  // equal to itself.
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

// Vector norms over a sharded dimension: the sums of powers are all-reduced, then the root is
// taken. Orders without a root (0, 1, infinity) are plain reductions and have a sharding rule
// (src/core/rules/reduction.cpp).

/// The positions of the arguments in the schema of a norm operator; -1 if the operator has no such
/// argument.
struct Norm {
  int dims = -1;
  int keepdim = -1;
  int dtype = -1;
};
constexpr Norm kVectorNorm{2, 3, 4}, kScalarNorm{}, kCastNorm{-1, -1, 2}, kDimNorm{2, 3, -1};

double order_of(const c10::IValue& order) {
  return order.isNone() ? 2.0 : order.toScalar().toDouble();
}
double order_of(const BoundCall& bound) {
  return bound.call.is_none(1) ? 2.0 : bound.call.number(1);
}

template <const Norm& kNorm>
std::optional<double> bytes_of_norm(const BoundCall& bound) {
  const auto reduction = reduction_of(bound, kNorm.dims);
  if (!reduction || !c10::isFloatingType(reduction->spec.dtype)) {
    return std::nullopt;
  }
  const auto& [spec, dims] = *reduction;
  const auto order = order_of(bound);
  // The infinity norm is the maximum (for order -inf the minimum) of absolute values, so the result
  // is Partial(max) or Partial(min), without communication.
  if (std::isinf(order)) {
    return 0;
  }
  return all_reduce_bytes(spec, dims, static_cast<double>(most_local_results(spec, dims)));
}

template <const Norm& kNorm>
Results run_norm(Arguments arguments) {
  auto self = arguments[0].toTensor();
  const auto order = order_of(arguments[1]);
  const auto dims = kNorm.dims >= 0 && !arguments[kNorm.dims].isNone()
                        ? arguments[kNorm.dims].toIntVector()
                        : Dims{};
  const bool keepdim = kNorm.keepdim >= 0 && arguments[kNorm.keepdim].toBool();
  if (kNorm.dtype >= 0 && !arguments[kNorm.dtype].isNone()) {
    self = self.to(arguments[kNorm.dtype].toScalarType());
  }
  if (std::isinf(order)) {
    const auto sizes = self.abs();
    return {order > 0 ? sizes.amax(dims, keepdim) : sizes.amin(dims, keepdim)};
  }
  // The sum is accumulated in libtorch's arithmetic type, because squares overflow half precision.
  // The result is Partial.
  const auto sum =
      at::linalg__powsum(self, order, dims, keepdim, at::toOpMathType(self.scalar_type()));
  return {reduce_partial(sum).pow(1 / order).to(self.scalar_type())};
}

// The mean of a loss over a sharded batch: a sum, divided by the total weight over all shards.

/// Bytes that one rank sends for one all-reduce of the loss and the total weight.
std::optional<double> bytes_of_mean(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  if (self == nullptr || bound.call.integer(3) != at::Reduction::Mean) {
    return std::nullopt;
  }
  const auto& spec = *self->spec();
  Dims samples = all_dims(static_cast<std::int64_t>(spec.sizes.size()));
  const std::size_t classes = samples.size() > 1 ? 1 : 0;
  // The loss of a sample reads the score of one class, so the class dimension must not be sharded.
  if (!sharding_mesh_dims(spec.sharding.layout, {static_cast<std::int64_t>(classes)}).empty()) {
    return std::nullopt;
  }
  return all_reduce_bytes(spec, samples, 2);
}

/// Arguments: (self, target, weight, reduction, ignore_index)
Results run_mean(Arguments arguments) {
  // Computes the sum first; the sharding rule makes the sum and the weight Partial. Shards have
  // different weights, because of their sizes, classes and ignored samples.
  const auto [sum, weight] = at::nll_loss_forward(arguments[0].toTensor(), arguments[1].toTensor(),
                                                  arguments[2].toOptional<at::Tensor>(),
                                                  at::Reduction::Sum, arguments[4].toInt());
  const auto total = reduce_partials_together({sum, weight});
  // unbind returns views, but the operator must return separate tensors: weight is cloned.
  return {total[0] / total[1], total[1].clone()};
}

// equal(self, other) for tensors with the same layout: each rank compares its shard.

std::optional<double> bytes_of_equal(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  const auto* other = non_partial_argument(bound, 1);
  if (self == nullptr || other == nullptr || self->local().is_meta()) {
    return std::nullopt;
  }
  // Compares the mesh, layout and sizes, but not the strides, because equal() ignores strides.
  const bool alike = self->spec()->sharding == other->spec()->sharding &&
                     self->spec()->sizes == other->spec()->sizes;
  return alike ? std::optional(all_reduce_bytes(*self->spec(), all_dims(self->dim()), 1))
               : std::nullopt;
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
  // item() reads the result from the device; on a GPU the host waits for the device.
  return {local_tensor(verdict).item<bool>()};
}

const AddedLowerings kReductionLowerings{
    {"amax", bytes_of_values, run_values<true>},
    {"amin", bytes_of_values, run_values<false>},
    {"max", bytes_of_values, run_values<true>},
    {"min", bytes_of_values, run_values<false>},
    {"max.dim", bytes_of_candidates, run_with_indices<true>},
    {"min.dim", bytes_of_candidates, run_with_indices<false>},
    {"argmax", bytes_of_candidates, run_extremum_index<true>},
    {"argmin", bytes_of_candidates, run_extremum_index<false>},
    {"linalg_vector_norm", bytes_of_norm<kVectorNorm>, run_norm<kVectorNorm>},
    {"norm.Scalar", bytes_of_norm<kScalarNorm>, run_norm<kScalarNorm>},
    {"norm.ScalarOpt_dtype", bytes_of_norm<kCastNorm>, run_norm<kCastNorm>},
    {"norm.ScalarOpt_dim", bytes_of_norm<kDimNorm>, run_norm<kDimNorm>},
    {"norm.ScalarOpt_dim_dtype", bytes_of_norm<kVectorNorm>, run_norm<kVectorNorm>},
    {"nll_loss_forward", bytes_of_mean, run_mean},
    {"equal", bytes_of_equal, run_equal},
};

}  // namespace
}  // namespace tessera::detail
