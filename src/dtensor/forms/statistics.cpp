// Variances and logsumexp where a reduced dimension is sharded: two all-reduces of the size of the
// result.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>

#include <algorithm>

#include "forms/form.h"
#include "forms/shard_slices.h"

namespace tessera::detail {
namespace {

/// Two all-reduces of the results.
std::optional<double> bytes_of_two_sums(const BoundCall& bound) {
  const auto reduction = reduction_of(bound, 1);
  if (!reduction || !c10::isFloatingType(reduction->spec.dtype)) {
    return std::nullopt;
  }
  const auto& [spec, dims] = *reduction;
  // Sums are sent in the type of arithmetic, which is wider for half precision.
  const auto math = c10::elementSize(at::toOpMathType(spec.dtype)) / c10::elementSize(spec.dtype);
  return 2 *
         all_reduce_bytes(spec, dims, static_cast<double>(math * most_local_results(spec, dims)));
}

/// logsumexp(self, dims, keepdim)
Results run_logsumexp(Arguments arguments) {
  const auto& self = arguments[0].toTensor();
  const auto dims = named_dims(arguments[1], self.dim());
  const bool keepdim = arguments[2].toBool();
  const auto values = self.to(at::toOpMathType(self.scalar_type()));
  auto largest = reduce_partial(values.amax(dims, true));
  // Where all values are infinite: their differences would be NaN.
  largest = largest.masked_fill(largest.isinf(), 0.0);
  // Shifted by the largest, as in a softmax: exp() of a large value is infinite.
  const auto sum = reduce_partial((values - largest).exp().sum(dims, true));
  auto result = sum.log() + largest;
  if (!keepdim) {
    result = result.squeeze(dims);
  }
  return {result.to(self.scalar_type())};
}

struct Moments {
  at::Tensor mean, variance;  ///< with the reduced dimensions kept, in the type of arithmetic
};

/// The arguments are (self, dims?, correction?, keepdim). The squares are of differences from the
/// mean: E(x^2) - E(x)^2 would cancel.
Moments moments_of(Arguments arguments) {
  const auto& self = arguments[0].toTensor();
  const auto dims = named_dims(arguments[1], self.dim());
  const auto values = self.to(at::toOpMathType(self.scalar_type()));
  const auto count = static_cast<double>(numel_along(*impl_of(self).spec(), dims));
  const auto correction = arguments[2].isNone() ? 1.0 : arguments[2].toScalar().toDouble();
  // Two all-reduces, one after the other: the squares need the mean.
  const auto mean = reduce_partial(values.sum(dims, true)) / count;
  const auto centred = values - mean;
  const auto squares = reduce_partial((centred * centred).sum(dims, true));
  // As libtorch has it: a correction of all samples or more divides by 0.
  return {mean, squares / std::max(count - correction, 0.0)};
}

/// A result in the type and with the dimensions that the call asks for.
at::Tensor finished(const at::Tensor& kept, Arguments arguments) {
  const auto& self = arguments[0].toTensor();
  const auto result = kept.to(self.scalar_type());
  return arguments[3].toBool() ? result : result.squeeze(named_dims(arguments[1], self.dim()));
}

Results run_variance(Arguments arguments) {
  return {finished(moments_of(arguments).variance, arguments)};
}
Results run_deviation(Arguments arguments) {
  return {finished(moments_of(arguments).variance.sqrt(), arguments)};
}
Results run_variance_and_mean(Arguments arguments) {
  const auto moments = moments_of(arguments);
  return {finished(moments.variance, arguments), finished(moments.mean, arguments)};
}
Results run_deviation_and_mean(Arguments arguments) {
  const auto moments = moments_of(arguments);
  return {finished(moments.variance.sqrt(), arguments), finished(moments.mean, arguments)};
}

const AddedForms kStatisticsForms{
    {"logsumexp", bytes_of_two_sums, run_logsumexp},
    {"var.correction", bytes_of_two_sums, run_variance},
    {"std.correction", bytes_of_two_sums, run_deviation},
    {"var_mean.correction", bytes_of_two_sums, run_variance_and_mean},
    {"std_mean.correction", bytes_of_two_sums, run_deviation_and_mean},
};

}  // namespace

}  // namespace tessera::detail
