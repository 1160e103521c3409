// Lowerings of norms and of means of losses.

#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/linalg__powsum.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lowerings/lowering.h"
#include "redistribute/redistribute.h"
#include "tessera/dtensor/detail/make_distributed.h"

namespace tessera::detail {

// Vector norms over a sharded dimension all-reduce sums of powers before the root. The orders 0, 1
// and infinity have sharding rules instead (src/core/rules/reduction.cpp).

namespace {

/// The indices of `dims`, `keepdim` and `dtype` among the arguments of a norm operator; -1 if the
/// operator lacks the argument.
struct Norm {
  int dims = -1;
  int keepdim = -1;
  int dtype = -1;
};
constexpr Norm kVectorNorm{2, 3, 4}, kScalarNorm{}, kCastNorm{-1, -1, 2}, kDimNorm{2, 3, -1};

Dims all_dims(const TensorSpec& spec) {
  Dims dims(spec.sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

template <const Norm& kNorm>
std::optional<double> bytes_of_norm(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  if (self == nullptr || !c10::isFloatingType(self->spec()->dtype) ||
      (!bound.call.is_none(1) && std::isinf(bound.call.number(1)))) {
    return std::nullopt;
  }
  const TensorSpec& spec = *self->spec();
  Dims dims = kNorm.dims < 0 ? Dims{} : bound.call.integers(static_cast<std::size_t>(kNorm.dims));
  for (auto& dim : dims) {
    dim += dim < 0 ? std::ssize(spec.sizes) : 0;
  }
  if (dims.empty()) {
    dims = all_dims(spec);
  }
  // An empty tensor is gathered, so that libtorch throws its own error for an empty tensor.
  if (std::ranges::any_of(
          dims, [&](auto dim) { return spec.sizes[static_cast<std::size_t>(dim)] == 0; })) {
    return std::nullopt;
  }
  return all_reduce_bytes(spec, dims, static_cast<double>(most_local_results(spec, dims)));
}

/// Returns `tensor` with Replicate in place of Partial. Collective if `tensor` is Partial. Runs
/// below autograd.
at::Tensor reduce_partial(const at::Tensor& tensor) {
  const DistributedTensorImpl& impl = *as_distributed(tensor);
  const auto& spec = impl.spec();
  const auto target = gradient_layout(spec->sharding.layout);
  if (target == spec->sharding.layout) {
    return tensor;
  }
  return make_distributed(redistribute_local(impl.local(), spec, target),
                          {spec->sharding.mesh, target}, spec->sizes);
}

template <const Norm& kNorm>
Results run_norm(Arguments arguments) {
  auto self = arguments[0].toTensor();
  const double order = arguments[1].isNone() ? 2.0 : arguments[1].toScalar().toDouble();
  const auto dims = kNorm.dims >= 0 && !arguments[kNorm.dims].isNone()
                        ? arguments[kNorm.dims].toIntVector()
                        : Dims{};
  const bool keepdim = kNorm.keepdim >= 0 && arguments[kNorm.keepdim].toBool();
  if (kNorm.dtype >= 0 && !arguments[kNorm.dtype].isNone()) {
    self = self.to(arguments[kNorm.dtype].toScalarType());
  }
  // The sum of powers is accumulated in fp32 for half-precision tensors, because squares overflow
  // half precision. The result is Partial.
  const auto sum =
      at::linalg__powsum(self, order, dims, keepdim, at::toOpMathType(self.scalar_type()));
  return {reduce_partial(sum).pow(1 / order).to(self.scalar_type())};
}

// The mean of a loss over a sharded batch is the sum of losses divided by the global total weight.

std::optional<double> bytes_of_mean(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  if (self == nullptr || bound.call.integer(3) != at::Reduction::Mean) {
    return std::nullopt;
  }
  const auto& spec = *self->spec();
  const std::int64_t classes = spec.sizes.size() > 1 ? 1 : 0;
  // All class scores of a sample must be on one rank: the loss reads the target class's score.
  if (!sharding_mesh_dims(spec.sharding.layout, {classes}).empty()) {
    return std::nullopt;
  }
  return all_reduce_bytes(spec, all_dims(spec), 2);
}

/// `arguments`: (self, target, weight, reduction, ignore_index) of the loss operator.
Results run_mean(Arguments arguments) {
  // The total weight is reduced together with the loss: the weight depends on the classes and on
  // ignored samples, not only on sizes.
  const auto [sum, weight] = at::nll_loss_forward(arguments[0].toTensor(), arguments[1].toTensor(),
                                                  arguments[2].toOptional<at::Tensor>(),
                                                  at::Reduction::Sum, arguments[4].toInt());
  const auto total = reduce_partial(at::stack({sum, weight})).unbind();
  // clone(), because the results must not be views of one tensor.
  return {total[0] / total[1], total[1].clone()};
}

const AddedLowerings kReductionLowerings{
    {"linalg_vector_norm", bytes_of_norm<kVectorNorm>, run_norm<kVectorNorm>},
    {"norm.Scalar", bytes_of_norm<kScalarNorm>, run_norm<kScalarNorm>},
    {"norm.ScalarOpt_dtype", bytes_of_norm<kCastNorm>, run_norm<kCastNorm>},
    {"norm.ScalarOpt_dim", bytes_of_norm<kDimNorm>, run_norm<kDimNorm>},
    {"norm.ScalarOpt_dim_dtype", bytes_of_norm<kVectorNorm>, run_norm<kVectorNorm>},
    {"nll_loss_forward", bytes_of_mean, run_mean},
};

}  // namespace
}  // namespace tessera::detail
