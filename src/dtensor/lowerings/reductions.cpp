// Lowerings of reductions and of means of losses.

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg__powsum.h>
#include <ATen/ops/nll_loss_forward.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lowerings/lowering.h"
#include "rank/rank.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"

namespace tessera::detail {

// Maxima and minima without indices over a sharded dimension: the result is Partial(max) or
// Partial(min), so the lowering does not communicate. An empty shard contributes a value that
// changes no maximum or minimum.

namespace {

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

/// A call with the arguments (self, dims?, keepdim?).
struct ExtremumCall {
  explicit ExtremumCall(Arguments arguments)
      : impl(impl_of(arguments[0].toTensor())),
        spec(*impl.spec()),
        keepdim(arguments.size() > 2 && arguments[2].toBool()),
        dims(arguments.size() < 2 ? all_dims(impl.dim()) : named_dims(arguments[1], impl.dim())) {}

  const DistributedTensorImpl& impl;
  const TensorSpec& spec;
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
  // Computes the sum first; the sharding rule makes sum and total weight Partial. Shards have
  // different weights, because of their sizes, classes and ignored samples.
  const auto [sum, weight] = at::nll_loss_forward(arguments[0].toTensor(), arguments[1].toTensor(),
                                                  arguments[2].toOptional<at::Tensor>(),
                                                  at::Reduction::Sum, arguments[4].toInt());
  const auto total = reduce_partials_together({sum, weight});
  // unbind returns views, but the operator must return separate tensors: weight is cloned.
  return {total[0] / total[1], total[1].clone()};
}

const AddedLowerings kReductionLowerings{
    {"amax", bytes_of_values, run_values<true>},
    {"amin", bytes_of_values, run_values<false>},
    {"max", bytes_of_values, run_values<true>},
    {"min", bytes_of_values, run_values<false>},
    {"linalg_vector_norm", bytes_of_norm<kVectorNorm>, run_norm<kVectorNorm>},
    {"norm.Scalar", bytes_of_norm<kScalarNorm>, run_norm<kScalarNorm>},
    {"norm.ScalarOpt_dtype", bytes_of_norm<kCastNorm>, run_norm<kCastNorm>},
    {"norm.ScalarOpt_dim", bytes_of_norm<kDimNorm>, run_norm<kDimNorm>},
    {"norm.ScalarOpt_dim_dtype", bytes_of_norm<kVectorNorm>, run_norm<kVectorNorm>},
    {"nll_loss_forward", bytes_of_mean, run_mean},
};

}  // namespace
}  // namespace tessera::detail
