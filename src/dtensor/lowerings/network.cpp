// Lowerings of neural-network operators.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>

#include "lowerings/lowering.h"
#include "rank/rank.h"
#include "tessera/comm/communicator.h"
#include "tessera/dtensor/detail/make_distributed.h"

namespace tessera::detail {

// Batch normalisation in training with sharded samples, as in PyTorch's SyncBatchNorm.

namespace {

Dims samples_of(std::int64_t ndim) {
  Dims dims = all_dims(ndim);
  dims.erase(dims.begin() + 1);
  return dims;
}

/// Bytes that one rank sends for all-reduces of `sums` numbers per channel.
std::optional<double> bytes_of_channels(const DistributedTensorImpl* input, double sums) {
  if (input == nullptr || input->dim() < 2) {
    return std::nullopt;
  }
  const auto& spec = *input->spec();
  if (!c10::isFloatingType(spec.dtype) || spec.sizes[1] == 0) {
    return std::nullopt;
  }
  const auto samples = samples_of(input->dim());
  // libtorch handles a single sample per channel, because the unbiased variance would divide by 0.
  if (numel_along(spec, samples) < 2) {
    return std::nullopt;
  }
  return all_reduce_bytes(spec, samples,
                          sums * static_cast<double>(most_local_results(spec, samples)));
}

std::optional<double> bytes_of_forward(const BoundCall& bound) {
  // In evaluation nothing is summed over samples, and the sharding rule handles the call.
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

at::Tensor channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = input.size(1);
  return values.view(shape);
}

double count_of(const at::Tensor& input) {
  return static_cast<double>(numel_along(*impl_of(input).spec(), samples_of(input.dim())));
}

void follow(const c10::IValue& running, const at::Tensor& now, double momentum) {
  if (!is_given(running)) {
    return;
  }
  running.toTensor().mul_(1 - momentum).add_(now, momentum);
}

/// Arguments: native_batch_norm(input, weight, bias, mean, variance, training, momentum, eps)
Results run_forward(Arguments arguments) {
  const auto& input = arguments[0].toTensor();
  const auto samples = samples_of(input.dim());
  const auto count = count_of(input);
  const auto values = input.to(at::toOpMathType(input.scalar_type()));
  // The mean is computed before the squares, in two all-reduces: E(x^2) - E(x)^2 in one all-reduce
  // would cancel. Computed in the arithmetic type, since sums of half precision overflow.
  const auto mean = reduce_partial(values.sum(samples)) / count;
  const auto centred = values - channels(mean, input);
  const auto variance = reduce_partial((centred * centred).sum(samples)) / count;
  const auto momentum = arguments[6].toDouble();
  follow(arguments[3], mean, momentum);
  // As in libtorch, values are normalised by the biased variance, but the running variance is
  // unbiased.
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

/// Arguments: native_batch_norm_backward(gradient, input, weight, running mean, running variance,
/// mean, scale, training, eps, mask)
Results run_backward(Arguments arguments) {
  const auto& input = arguments[1].toTensor();
  const auto type = at::toOpMathType(input.scalar_type());
  const auto samples = samples_of(input.dim());
  const auto gradient = arguments[0].toTensor().to(type);
  const auto scale = channels(arguments[6].toTensor(), input);
  const auto normal = (input.to(type) - channels(arguments[5].toTensor(), input)) * scale;
  // One all-reduce computes the sums for the gradients of weight and bias, even if the mask
  // requests only one of them.
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

const AddedLowerings kBatchNormLowerings{
    {"native_batch_norm", bytes_of_forward, run_forward},
    {"native_batch_norm_backward", bytes_of_backward, run_backward},
};

// The backward of a convolution whose input channels are sharded. The bias's gradient is not a sum
// over input channels (each shard would compute all of it), so it is computed separately.

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
  // Supports input and weight that are both sharded over the input channels, if the bias's gradient
  // is requested. Several channel groups are not supported: a shard of the input channels would
  // then belong to only some of the output channels.
  const auto in = sharding_mesh_dims(layout, {1});
  if (bound.call.integer(kGroups) != 1 || bound.call.integers(kGradientMask).at(2) == 0) {
    return std::nullopt;
  }
  if (in.empty() ||
      in != sharding_mesh_dims(weight->spec()->sharding.layout, {transposed ? 0 : 1})) {
    return std::nullopt;
  }
  // The gradient of the output has no input channels, so it must not be sharded along these mesh
  // dimensions.
  for (const int m : in) {
    if (gradient->spec()->sharding.layout->sharded_dim(m) >= 0) {
      return std::nullopt;
    }
  }
  return 0;
}

/// Arguments: convolution_backward(gradient, input, weight, bias sizes, stride, padding, dilation,
/// transposed, output padding, groups, mask)
Results run_separate_bias_gradient(Arguments arguments) {
  const auto& gradient = arguments[0].toTensor();
  const auto mask = arguments[kGradientMask].toBoolList();
  // Dispatches the operator again without the bias's gradient, so that this lowering does not apply
  // to the inner call.
  const auto [of_input, of_weight, none] = at::convolution_backward(
      gradient, arguments[1].toTensor(), arguments[2].toTensor(), at::OptionalIntArrayRef(),
      arguments[4].toIntVector(), arguments[5].toIntVector(), arguments[6].toIntVector(),
      arguments[7].toBool(), arguments[8].toIntVector(), arguments[kGroups].toInt(),
      {mask.get(0), mask.get(1), false});
  auto rest = all_dims(gradient.dim());
  rest.erase(rest.begin() + 1);
  return {of_input, of_weight, gradient.sum(rest)};
}

const AddedLowerings kConvolutionLowerings{
    {"convolution_backward", bytes_of_separate_bias_gradient, run_separate_bias_gradient},
};

// The mean of a loss with sharded samples: a sum, divided by the total weight over all shards.

/// Bytes that one rank sends for one all-reduce of the loss and the total weight.
std::optional<double> bytes_of_mean(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  if (self == nullptr || bound.call.integer(3) != at::Reduction::Mean) {
    return std::nullopt;
  }
  const auto& spec = *self->spec();
  Dims samples = all_dims(static_cast<std::int64_t>(spec.sizes.size()));
  const std::size_t classes = samples.size() > 1 ? 1 : 0;
  // Each sample reads the score of one class, so the dimension of classes must not be sharded.
  if (!sharding_mesh_dims(spec.sharding.layout, {static_cast<std::int64_t>(classes)}).empty()) {
    return std::nullopt;
  }
  return all_reduce_bytes(spec, samples, 2);
}

/// Arguments: (self, target, weight, reduction, ignore_index)
template <auto kForward>
Results run_mean(Arguments arguments) {
  // Computes the sum first; the rule leaves the sum and the weight partial. Shards have different
  // weights, because of their sizes, classes and ignored samples.
  const auto [sum, weight] =
      kForward(arguments[0].toTensor(), arguments[1].toTensor(),
               arguments[2].toOptional<at::Tensor>(), at::Reduction::Sum, arguments[4].toInt());
  const auto total = reduce_partials_together({sum, weight});
  // A clone, because unbind returns views, but the operator must return separate tensors.
  return {total[0] / total[1], total[1].clone()};
}

const AddedLowerings kLossesLowerings{
    {"nll_loss_forward", bytes_of_mean, run_mean<at::_ops::nll_loss_forward::call>},
    {"nll_loss2d_forward", bytes_of_mean, run_mean<at::_ops::nll_loss2d_forward::call>},
};

// Lowerings of operators whose result depends on tensor values: indexing, and equal().

/// Whether the tensor is replicated. A plain tensor counts as replicated; check_policy refuses it
/// unless the scopes permit it.
bool is_replicated(const at::Tensor& tensor) {
  const auto* impl = as_distributed(tensor);
  return impl == nullptr || impl->spec()->sharding.layout->is_replicated();
}

// self[masks and indices], if masks and indices are replicated and the indexed dimensions of self
// are not sharded.

/// The dimensions of self that the indices consume. A mask consumes as many dimensions as it has
/// itself.
Dims indexed_dims(std::span<const std::optional<at::Tensor>> indices) {
  Dims dims;
  std::int64_t dim = 0;
  for (const auto& index : indices) {
    const bool given = index && index->defined();
    const bool mask =
        given && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
    const std::int64_t taken = mask ? index->dim() : 1;
    for (std::int64_t i = 0; given && i < taken; ++i) {
      dims.push_back(dim + i);
    }
    dim += taken;
  }
  return dims;
}

std::vector<std::optional<at::Tensor>> indices_of(const BoundCall& bound) {
  std::vector<std::optional<at::Tensor>> indices;
  for (const auto ref : bound.call.tensor_list(1)) {
    indices.push_back(ref.index < 0
                          ? std::nullopt
                          : std::optional(bound.tensors[static_cast<std::size_t>(ref.index)]));
  }
  return indices;
}

std::optional<double> bytes_of_index(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  // Excludes meta tensors: the values of a mask, which a meta tensor lacks, determine how many
  // elements are selected.
  if (self == nullptr || self->local().is_meta()) {
    return std::nullopt;
  }
  const auto indices = indices_of(bound);
  for (const auto& index : indices) {
    if (index && !is_replicated(*index)) {
      return std::nullopt;
    }
  }
  const auto dims = indexed_dims(indices);
  if (dims.empty() || dims.back() >= self->dim()) {
    return std::nullopt;
  }
  // The dimensions that are not indexed may be sharded, because indexing is the same at each of
  // their positions.
  if (!sharding_mesh_dims(self->spec()->sharding.layout, dims).empty()) {
    return std::nullopt;
  }
  return 0;
}

/// Position of the indices' dimensions in the result: in place of indexed dimensions that are
/// adjacent, otherwise in front.
std::size_t position_of_indices(const Dims& indexed) {
  const bool adjacent =
      indexed.back() - indexed.front() + 1 == static_cast<std::int64_t>(indexed.size());
  return adjacent ? static_cast<std::size_t>(indexed.front()) : 0;
}

/// Arguments of index.Tensor: self, indices.
Results run_index(Arguments arguments) {
  const auto& impl = impl_of(arguments[0].toTensor());
  c10::List<std::optional<at::Tensor>> locals;
  std::vector<std::optional<at::Tensor>> indices;
  for (const auto& element : arguments[1].toListRef()) {
    indices.push_back(element.toOptional<at::Tensor>());
    locals.push_back(indices.back() ? std::optional(local_tensor(*indices.back())) : std::nullopt);
  }
  const auto dims = indexed_dims(indices);
  const auto& spec = *impl.spec();
  auto result = reduced_spec(spec, dims, false);
  at::Tensor local;
  {
    BelowAutograd guard;
    local = at::index(impl.local(), locals);
  }
  auto digits = result.layout->dims();
  const auto position = static_cast<std::ptrdiff_t>(position_of_indices(dims));
  // A mask becomes one dimension, and indices become the dimensions of their broadcast. The number
  // and sizes of the new dimensions are those of the local result, which is not sharded along them.
  const auto added = static_cast<std::size_t>(local.dim()) - digits.size();
  digits.insert(digits.begin() + position, added, {});
  for (std::size_t i = 0; i < added; ++i) {
    const auto at = position + static_cast<std::ptrdiff_t>(i);
    result.sizes.insert(result.sizes.begin() + at, local.size(at));
  }
  const auto layout = Layout::intern(result.layout->mesh_sizes(), std::move(digits));
  return {make_distributed(local, {spec.sharding.mesh, layout}, result.sizes)};
}

// equal(self, other) for tensors with the same layout: each rank compares its shard.

std::optional<double> bytes_of_equal(const BoundCall& bound) {
  const auto* self = non_partial_argument(bound, 0);
  const auto* other = non_partial_argument(bound, 1);
  if (self == nullptr || other == nullptr || self->local().is_meta()) {
    return std::nullopt;
  }
  // Compares only the shardings, because equal() ignores strides.
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
  // The host reads the result; on a GPU this waits for the device.
  return {local_tensor(verdict).item<bool>()};
}

const AddedLowerings kSelectionLowerings{
    {"index.Tensor", bytes_of_index, run_index},
    {"equal", bytes_of_equal, run_equal},
};

}  // namespace

}  // namespace tessera::detail
