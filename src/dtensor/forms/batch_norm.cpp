// Batch normalisation in training where samples are sharded: the sums of each channel are
// all-reduced. PyTorch's SyncBatchNorm.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>

#include "forms/form.h"
#include "forms/shard_slices.h"

namespace tessera::detail {
namespace {

/// All dimensions but the channels'.
Dims samples_of(std::int64_t ndim) {
  Dims dims = all_dims(ndim);
  dims.erase(dims.begin() + 1);
  return dims;
}

/// All-reduces of `sums` numbers a channel.
std::optional<double> bytes_of_channels(const DistributedTensorImpl* input, double sums) {
  if (input == nullptr || input->dim() < 2) {
    return std::nullopt;
  }
  const auto& spec = *input->spec();
  if (!c10::isFloatingType(spec.dtype) || spec.sizes[1] == 0) {
    return std::nullopt;
  }
  const auto samples = samples_of(input->dim());
  // The unbiased variance of one value divides by 0: libtorch handles that.
  if (numel_along(spec, samples) < 2) {
    return std::nullopt;
  }
  return all_reduce_bytes(spec, samples,
                          sums * static_cast<double>(most_local_results(spec, samples)));
}

std::optional<double> bytes_of_forward(const BoundCall& bound) {
  // Outside of training nothing is summed, and the running statistics are used: the rule covers it.
  if (!bound.call.boolean_or(5, false)) {
    return std::nullopt;
  }
  return bytes_of_channels(non_partial_argument(bound, 0), 2);
}

std::optional<double> bytes_of_backward(const BoundCall& bound) {
  if (!bound.call.boolean_or(7, false)) {
    return std::nullopt;
  }
  return bytes_of_channels(non_partial_argument(bound, 1), 2);
}

bool is_given(const c10::IValue& argument) {
  return argument.isTensor() && argument.toTensor().defined();
}

/// `values`, one per channel, in the shape that broadcasts to `input`.
at::Tensor channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = input.size(1);
  return values.view(shape);
}

double count_of(const at::Tensor& input) {
  return static_cast<double>(numel_along(*impl_of(input).spec(), samples_of(input.dim())));
}

/// Updates a running statistic.
void follow(const c10::IValue& running, const at::Tensor& now, double momentum) {
  if (!is_given(running)) {
    return;
  }
  running.toTensor().mul_(1 - momentum).add_(now, momentum);
}

/// native_batch_norm(input, weight, bias, running mean, running variance, training, momentum, eps)
Results run_forward(Arguments arguments) {
  const auto& input = arguments[0].toTensor();
  const auto samples = samples_of(input.dim());
  const auto count = count_of(input);
  const auto values = input.to(at::toOpMathType(input.scalar_type()));
  // The mean before the squares, in two all-reduces: E(x^2) - E(x)^2 in one would cancel. In the
  // type of arithmetic, since sums of half precision overflow.
  const auto mean = reduce_partial(values.sum(samples)) / count;
  const auto centred = values - channels(mean, input);
  const auto variance = reduce_partial((centred * centred).sum(samples)) / count;
  const auto momentum = arguments[6].toDouble();
  follow(arguments[3], mean, momentum);
  // Values are normalised by the biased variance; the running one is unbiased. As in libtorch.
  follow(arguments[4], variance * (count / (count - 1)), momentum);
  const auto scale = (variance + arguments[7].toDouble()).rsqrt();
  auto result = centred * channels(scale, input);
  if (is_given(arguments[1])) {
    result = result * channels(arguments[1].toTensor(), input);
  }
  if (is_given(arguments[2])) {
    result = result + channels(arguments[2].toTensor(), input);
  }
  return {result.to(input.scalar_type()), mean, scale};
}

/// Its backward(gradient, input, weight, running mean, running variance, mean, scale, training,
/// eps, mask)
Results run_backward(Arguments arguments) {
  const auto& input = arguments[1].toTensor();
  const auto type = at::toOpMathType(input.scalar_type());
  const auto samples = samples_of(input.dim());
  const auto gradient = arguments[0].toTensor().to(type);
  const auto scale = channels(arguments[6].toTensor(), input);
  const auto normal = (input.to(type) - channels(arguments[5].toTensor(), input)) * scale;
  // All three gradients are made of these two sums, and one all-reduce gives both, whichever of
  // them the mask asks for.
  const auto sums =
      reduce_partials_together({gradient.sum(samples), (gradient * normal).sum(samples)});
  const auto count = count_of(input);
  auto slope =
      (gradient - channels(sums[0], input) / count - normal * (channels(sums[1], input) / count)) *
      scale;
  const bool weighted = is_given(arguments[2]);
  if (weighted) {
    slope = slope * channels(arguments[2].toTensor(), input);
  }
  const auto parameter_type = weighted ? arguments[2].toTensor().scalar_type() : type;
  return {slope.to(input.scalar_type()), sums[1].to(parameter_type), sums[0].to(parameter_type)};
}

const AddedForms kBatchNormForms{
    {"native_batch_norm", bytes_of_forward, run_forward},
    {"native_batch_norm_backward", bytes_of_backward, run_backward},
};

}  // namespace

}  // namespace tessera::detail
