// The backward of a convolution whose in channels are split: the bias's gradient is no sum over
// them, so that it is computed apart.

#include <ATen/ops/convolution_backward.h>

#include <array>

#include "form.h"
#include "parts.h"

namespace tessera::detail {
namespace {

using Arguments = std::span<const c10::IValue>;
using Results = std::vector<c10::IValue>;

constexpr std::size_t kGroups = 9, kMask = 10;

std::optional<double> bytes_of_convolution_backward(const BoundCall& bound) {
  const auto* gradient = settled_argument(bound, 0);
  const auto* input = settled_argument(bound, 1);
  const auto* weight = settled_argument(bound, 2);
  if (gradient == nullptr || input == nullptr || weight == nullptr) return std::nullopt;
  const bool transposed = bound.call.boolean_or(7, false);
  const auto layout = input->spec()->sharding.layout;
  const auto in = splitting(layout, {1});
  if (bound.call.integer(kGroups) != 1 || bound.call.integers(kMask).at(2) == 0)
    return std::nullopt;
  if (in.empty() || in != splitting(weight->spec()->sharding.layout, {transposed ? 0 : 1})) {
    return std::nullopt;
  }
  for (const int m : in) {
    if (gradient->spec()->sharding.layout->sharded_dim(m) >= 0) return std::nullopt;
  }
  return 0;
}

/// convolution_backward(gradient, input, weight, bias sizes, stride, padding, dilation, transposed,
/// output padding, groups, mask)
Results run_convolution_backward(Arguments arguments) {
  const auto& gradient = arguments[0].toTensor();
  const auto mask = arguments[kMask].toBoolList();
  const auto [of_input, of_weight, none] = at::convolution_backward(
      gradient, arguments[1].toTensor(), arguments[2].toTensor(), at::OptionalIntArrayRef(),
      arguments[4].toIntVector(), arguments[5].toIntVector(), arguments[6].toIntVector(),
      arguments[7].toBool(), arguments[8].toIntVector(), arguments[kGroups].toInt(),
      {mask.get(0), mask.get(1), false});
  auto rest = all_dims(gradient.dim());
  rest.erase(rest.begin() + 1);
  return {of_input, of_weight, gradient.sum(rest)};
}

constexpr std::array kConvolutionForms{
    Form{"convolution_backward", bytes_of_convolution_backward, run_convolution_backward}};

}  // namespace

std::span<const Form> convolution_forms() {
  return kConvolutionForms;
}

}  // namespace tessera::detail
