// The backward of a convolution whose in channels are sharded. The gradient of the bias is no sum
// over them (each shard would compute all of it), so it is computed by itself.

#include <ATen/ops/convolution_backward.h>

#include "forms/form.h"
#include "forms/shard_slices.h"

namespace tessera::detail {
namespace {

constexpr std::size_t kGroups = 9, kGradientMask = 10;

std::optional<double> bytes_of_separate_bias_gradient(const BoundCall& bound) {
  const auto* gradient = non_partial_argument(bound, 0);
  const auto* input = non_partial_argument(bound, 1);
  const auto* weight = non_partial_argument(bound, 2);
  if (gradient == nullptr || input == nullptr || weight == nullptr) {
    return std::nullopt;
  }
  const bool transposed = bound.call.boolean_or(7, false);
  const auto layout = input->spec()->sharding.layout;
  // For input and weight that are sharded alike over the in channels, where the bias's gradient is
  // wanted. Not with several groups of channels: a shard of the in channels then belongs to some of
  // the out channels only.
  const auto in = sharding_mesh_dims(layout, {1});
  if (bound.call.integer(kGroups) != 1 || bound.call.integers(kGradientMask).at(2) == 0) {
    return std::nullopt;
  }
  if (in.empty() ||
      in != sharding_mesh_dims(weight->spec()->sharding.layout, {transposed ? 0 : 1})) {
    return std::nullopt;
  }
  // The gradient has no in channels: over these mesh dimensions it has to be whole.
  for (const int m : in) {
    if (gradient->spec()->sharding.layout->sharded_dim(m) >= 0) {
      return std::nullopt;
    }
  }
  return 0;
}

/// convolution_backward(gradient, input, weight, bias sizes, stride, padding, dilation, transposed,
/// output padding, groups, mask)
Results run_separate_bias_gradient(Arguments arguments) {
  const auto& gradient = arguments[0].toTensor();
  const auto mask = arguments[kGradientMask].toBoolList();
  // Dispatched again; the mask keeps it from coming back to this form.
  const auto [of_input, of_weight, none] = at::convolution_backward(
      gradient, arguments[1].toTensor(), arguments[2].toTensor(), at::OptionalIntArrayRef(),
      arguments[4].toIntVector(), arguments[5].toIntVector(), arguments[6].toIntVector(),
      arguments[7].toBool(), arguments[8].toIntVector(), arguments[kGroups].toInt(),
      {mask.get(0), mask.get(1), false});
  // All dimensions but the out channels'.
  auto rest = all_dims(gradient.dim());
  rest.erase(rest.begin() + 1);
  return {of_input, of_weight, gradient.sum(rest)};
}

const AddedForms kConvolutionForms{
    {"convolution_backward", bytes_of_separate_bias_gradient, run_separate_bias_gradient},
};

}  // namespace

}  // namespace tessera::detail
