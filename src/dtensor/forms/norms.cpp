// Vector norms where a reduced dimension is sharded: the sums of powers are all-reduced, then the
// root is taken. Orders that need no root (0, 1, infinity) are reductions, for which there is a
// rule (src/core/rules/reduction.cpp).

#include <ATen/OpMathType.h>
#include <ATen/ops/linalg__powsum.h>

#include <algorithm>
#include <cmath>

#include "forms/form.h"
#include "forms/shard_slices.h"

namespace tessera::detail {
namespace {

/// The positions of an operator's arguments; -1: it has no such argument.
struct Norm {
  int dims = -1;
  int keepdim = -1;
  int dtype = -1;
};
constexpr Norm kVectorNorm{2, 3, 4}, kScalarNorm{}, kCastNorm{-1, -1, 2}, kDimNorm{2, 3, -1};

double order_of(const c10::IValue& order) {
  return order.isNone() ? 2.0 : order.toScalar().toDouble();
}

template <const Norm& kNorm>
std::optional<double> bytes_of_norm(const BoundCall& bound) {
  const auto reduction = reduction_of(bound, kNorm.dims);
  if (!reduction || !c10::isFloatingType(reduction->spec.dtype)) {
    return std::nullopt;
  }
  const auto& [spec, dims] = *reduction;
  const auto order = bound.call.is_none(1) ? 2.0 : bound.call.number(1);
  // An extremum of absolute values: Partial(max) or Partial(min).
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
  // The sum is accumulated in the type that libtorch computes in: squares overflow half precision.
  // Dispatched, with a rule that leaves the sum partial.
  const auto sum =
      at::linalg__powsum(self, order, dims, keepdim, at::toOpMathType(self.scalar_type()));
  return {reduce_partial(sum).pow(1 / order).to(self.scalar_type())};
}

std::optional<double> bytes_of_norms(const BoundCall& bound) {
  double bytes = 0;
  for (const auto& tensor : bound.tensors) {
    const auto* impl = as_distributed(tensor);
    if (impl == nullptr || impl->spec()->sharding.layout->is_partial()) {
      return std::nullopt;
    }
    const auto& spec = *impl->spec();
    if (!c10::isFloatingType(spec.dtype)) {
      return std::nullopt;
    }
    bytes += all_reduce_bytes(spec, all_dims(tensor.dim()), 1);
  }
  const auto order = bound.call.is_none(1) ? 2.0 : bound.call.number(1);
  // run_norms sums only.
  if (std::isinf(order)) {
    return std::nullopt;
  }
  return bytes;
}

/// The indices of tensors, grouped by layout and type: tensors of a group can be stacked. In the
/// order of the list, so that all ranks find the same groups.
std::vector<std::vector<std::size_t>> indices_by_layout(const std::vector<at::Tensor>& tensors) {
  const auto is_like = [&](std::size_t a, std::size_t b) {
    return impl_of(tensors[a]).spec()->sharding == impl_of(tensors[b]).spec()->sharding &&
           tensors[a].scalar_type() == tensors[b].scalar_type();
  };
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto group =
        std::ranges::find_if(groups, [&](const auto& g) { return is_like(g.front(), i); });
    // A search for each tensor: models have few layouts.
    group == groups.end() ? groups.push_back({i}) : group->push_back(i);
  }
  return groups;
}

/// _foreach_norm(tensors, order, dtype). One all-reduce for all tensors of a layout and type.
Results run_norms(Arguments arguments) {
  const auto tensors = arguments[0].toTensorVector();
  const auto order = order_of(arguments[1]);
  std::vector<at::Tensor> sums;
  for (const auto& tensor : tensors) {
    const auto dtype = arguments[2].isNone() ? tensor.scalar_type() : arguments[2].toScalarType();
    sums.push_back(at::linalg__powsum(tensor, order, {}, false, at::toOpMathType(dtype)));
  }
  // Not one for each tensor: a model has hundreds.
  for (const auto& numbers : indices_by_layout(sums)) {
    std::vector<at::Tensor> group;
    for (const auto i : numbers) {
      group.push_back(sums[i]);
    }
    const auto totals = reduce_partials_together(group);
    for (std::size_t k = 0; k < numbers.size(); ++k) {
      sums[numbers[k]] = totals[k];
    }
  }
  c10::List<at::Tensor> norms;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto dtype =
        arguments[2].isNone() ? tensors[i].scalar_type() : arguments[2].toScalarType();
    norms.push_back(sums[i].pow(1 / order).to(dtype));
  }
  return {norms};
}

const AddedForms kNormsForms{
    {"linalg_vector_norm", bytes_of_norm<kVectorNorm>, run_norm<kVectorNorm>},
    {"norm.Scalar", bytes_of_norm<kScalarNorm>, run_norm<kScalarNorm>},
    {"norm.ScalarOpt_dtype", bytes_of_norm<kCastNorm>, run_norm<kCastNorm>},
    {"norm.ScalarOpt_dim", bytes_of_norm<kDimNorm>, run_norm<kDimNorm>},
    {"norm.ScalarOpt_dim_dtype", bytes_of_norm<kVectorNorm>, run_norm<kVectorNorm>},
    {"_foreach_norm.Scalar", bytes_of_norms, run_norms},
};

}  // namespace

}  // namespace tessera::detail
