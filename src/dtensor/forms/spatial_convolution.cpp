// Convolutions whose input is sharded along spatial dimensions, by halo exchange (Jin et al.,
// "Spatially parallel convolutions", 2018). Each rank convolves the window of the input that its
// shard of the result needs. The window's edges, the halos, come from the ranks that hold them. In
// backward the gradients of the halos go back and are added up; the gradients of weight and bias
// are Partial.

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "forms/form.h"
#include "forms/halo.h"
#include "forms/shard_slices.h"
#include "rank/below_autograd.h"
#include "redistribute/redistribute.h"

namespace tessera::detail {
namespace {

/// The positions of the arguments that forward and backward both have.
struct Positions {
  std::size_t input, weight, stride, transposed, groups;
  std::size_t padding() const { return stride + 1; }
  std::size_t dilation() const { return stride + 2; }
  std::size_t output_padding() const { return transposed + 1; }
};
constexpr Positions kForward{0, 1, 3, 6, 8}, kBackward{1, 2, 4, 7, 9};
constexpr std::size_t kBias = 2, kMask = 10;

/// Stride, padding and dilation of each spatial dimension.
struct Steps {
  Dims stride, padding, dilation;
};

// ConvolutionGeometry: which positions of the input each rank needs

/// A spatial dimension that is sharded.
struct ShardedDim {
  int dim;
  std::vector<int> mesh_dims;
  Ranges shards;   ///< positions of the input that each rank holds
  Ranges windows;  ///< and those that it needs; beyond the ends of the input where it is padded
};

/// What a convolution makes of a tensor sharded in space.
struct ConvolutionGeometry {
  std::vector<ShardedDim> sharded;
  Dims sizes;                  ///< of the result, global
  LayoutPtr layout = nullptr;  ///< of the result
};

/// A list argument may have one element for all dimensions.
Dims for_each_dim(Dims values, std::size_t count) {
  if (values.size() == 1) {
    values.resize(count, values.front());
  }
  return values;
}

/// The windows that ranges `results` of the result need, along one dimension.
Ranges windows_of(const Ranges& results, std::int64_t kernel, std::int64_t stride,
                  std::int64_t padding, std::int64_t dilation) {
  Ranges windows;
  for (const auto& part : results) {
    // Beyond the input's ends (negative, or past its size) where it is padded: the exchange gives
    // zeros there, and the convolution runs without padding.
    const auto first = part.begin * stride - padding;
    const auto last = (part.end - 1) * stride - padding;
    windows.push_back(part.size() == 0 ? Range()
                                       : Range{first, last + dilation * (kernel - 1) + 1});
  }
  return windows;
}

/// `kernel`: the sizes of the weight, (out channels, in channels, window...).
ConvolutionGeometry geometry_of(const TensorSpec& input, const Dims& kernel, const Steps& steps) {
  const auto layout = input.sharding.layout;
  ConvolutionGeometry geometry{{}, {input.sizes[0], kernel[0]}, nullptr};
  for (std::size_t dim = 2; dim < input.sizes.size(); ++dim) {
    const auto stride = steps.stride[dim - 2], padding = steps.padding[dim - 2];
    const auto dilation = steps.dilation[dim - 2];
    const auto span = dilation * (kernel[dim] - 1) + 1;
    // No room for the kernel: no elements, which geometry_of_call refuses. libtorch throws then.
    const auto room = input.sizes[dim] + 2 * padding - span;
    geometry.sizes.push_back(room < 0 ? 0 : room / stride + 1);
    const auto axis = static_cast<int>(dim);
    auto mesh_dims = layout->mesh_dims_of(axis);
    if (mesh_dims.empty()) {
      continue;
    }
    const auto results = shard_ranges(*layout, axis, geometry.sizes.back());
    geometry.sharded.push_back({axis, std::move(mesh_dims),
                                shard_ranges(*layout, axis, input.sizes[dim]),
                                windows_of(results, kernel[dim], stride, padding, dilation)});
  }
  // The result is cut as the input: each rank convolves its own part.
  geometry.layout = Layout::intern(layout->mesh_sizes(), layout->dims());
  return geometry;
}

// Cost: whether the form covers a call, and what it sends

/// The bytes that one rank sends in the exchanges. Sharded dimensions are exchanged one after
/// another, and each exchange also sends the halos of those before.
double bytes_of_exchange(const ConvolutionGeometry& geometry, const TensorSpec& input) {
  // A cost is what one rank sends at most: that of the largest range.
  const auto largest = [](const Ranges& ranges) {
    return std::ranges::max(ranges, {}, &Range::size).size();
  };
  Dims dims{1};
  auto rest = static_cast<double>(c10::elementSize(input.dtype));
  for (const auto& split : geometry.sharded) {
    dims.push_back(split.dim);
    rest *= static_cast<double>(largest(split.shards));
  }
  rest *= static_cast<double>(most_local_results(input, dims) * input.sizes[1]);
  double bytes = 0;
  for (const auto& split : geometry.sharded) {
    rest /= static_cast<double>(largest(split.shards));
    bytes += rest * static_cast<double>(most_sent(split.shards, split.windows));
    rest *= static_cast<double>(largest(split.windows));
  }
  return bytes;
}

bool is_replicated(const DistributedTensorImpl* impl) {
  return impl != nullptr && impl->spec()->sharding.layout->is_replicated();
}

/// Whether spatial dimensions are sharded, with one digit each, and channels are not.
bool is_sharded_in_space(const TensorSpec& input) {
  const auto layout = input.sharding.layout;
  bool sharded = false;
  for (int dim = 1; dim < layout->tensor_ndim(); ++dim) {
    const bool cuts = !layout->mesh_dims_of(dim).empty();
    // With several digits (a flattened view) a shard is not one range, and has no window.
    if (cuts && (dim == 1 || layout->digits(dim).size() != 1)) {
      return false;
    }
    sharded = sharded || cuts;
  }
  return sharded;
}

/// Whether libtorch accepts the arguments. If not the call is gathered, and throws on all ranks.
bool is_valid(const TensorSpec& input, const TensorSpec& weight, const Steps& steps,
              const Dims& output_padding, std::int64_t groups) {
  const auto spatial = input.sizes.size() - 2;
  const auto all = [](const Dims& values, std::int64_t least) {
    return std::ranges::all_of(values, [&](auto value) { return value >= least; });
  };
  const auto each = [&](const Dims& values, std::int64_t least) {
    return values.size() == spatial && all(values, least);
  };
  return each(steps.stride, 1) && each(steps.padding, 0) && each(steps.dilation, 1) &&
         each(output_padding, 0) && all(input.sizes, 1) && all(weight.sizes, 1) && groups > 0 &&
         weight.sizes[1] * groups == input.sizes[1] && weight.sizes[0] % groups == 0 &&
         weight.dtype == input.dtype && c10::isFloatingType(input.dtype);
}

/// The geometry of a call, if the form covers it.
std::optional<ConvolutionGeometry> geometry_of_call(const BoundCall& bound, const Positions& at) {
  const auto* input = non_partial_argument(bound, at.input);
  const auto* weight = non_partial_argument(bound, at.weight);
  if (input == nullptr || !is_replicated(weight) || bound.call.boolean_or(at.transposed, false)) {
    return std::nullopt;
  }
  const auto& spec = *input->spec();
  const auto& kernel = *weight->spec();
  if (spec.sizes.size() < 3 || spec.sizes.size() != kernel.sizes.size() ||
      !is_sharded_in_space(spec)) {
    return std::nullopt;
  }
  const auto list = [&](std::size_t place) {
    return for_each_dim(bound.call.integers(place), spec.sizes.size() - 2);
  };
  const Steps steps{list(at.stride), list(at.padding()), list(at.dilation())};
  if (!is_valid(spec, kernel, steps, list(at.output_padding()), bound.call.integer(at.groups))) {
    return std::nullopt;
  }
  auto geometry = geometry_of(spec, kernel.sizes, steps);
  // Nothing to compute, or an error of libtorch: the default handles both.
  if (std::ranges::find(geometry.sizes, 0) != geometry.sizes.end()) {
    return std::nullopt;
  }
  return geometry;
}

std::optional<double> bytes_of_convolution(const BoundCall& bound) {
  const auto geometry = geometry_of_call(bound, kForward);
  if (!geometry) {
    return std::nullopt;
  }
  const auto& input = *non_partial_argument(bound, kForward.input)->spec();
  if (!bound.call.is_none(kBias)) {
    const auto* bias = non_partial_argument(bound, kBias);
    if (!is_replicated(bias) || bias->spec()->dtype != input.dtype ||
        bias->spec()->sizes != Dims{geometry->sizes[1]}) {
      return std::nullopt;
    }
  }
  return bytes_of_exchange(*geometry, input);
}

std::optional<double> bytes_of_convolution_backward(const BoundCall& bound) {
  const auto geometry = geometry_of_call(bound, kBackward);
  if (!geometry || !bound.call.has_tensor(0)) {
    return std::nullopt;
  }
  const auto* gradient =
      as_distributed(bound.tensors[static_cast<std::size_t>(bound.call.tensor_index(0))]);
  const auto& input = *non_partial_argument(bound, kBackward.input)->spec();
  if (gradient == nullptr || gradient->spec()->sizes != geometry->sizes ||
      gradient->spec()->dtype != input.dtype) {
    return std::nullopt;
  }
  const auto mask = bound.call.integers(kMask);
  // The weight's gradient needs the window; the input's gradient sends that of the window back.
  const auto exchanges = static_cast<double>((mask.at(0) != 0) + (mask.at(1) != 0));
  return static_cast<double>(plan_for(gradient->spec(), geometry->layout)->bytes()) +
         exchanges * bytes_of_exchange(*geometry, input);
}

// Execution

/// One call on this rank. Windows include the padding along sharded dimensions already.
class SpatialCall {
 public:
  SpatialCall(Arguments arguments, const Positions& at)
      : arguments_(arguments),
        at_(at),
        input_(impl_of(arguments[at.input].toTensor())),
        weight_(impl_of(arguments[at.weight].toTensor()).local()),
        steps_{list(at.stride), list(at.padding()), list(at.dilation())},
        geometry_(geometry_of(spec(), weight_.sizes().vec(), steps_)) {
    // The window includes its padding.
    for (const auto& split : geometry_.sharded) {
      steps_.padding[static_cast<std::size_t>(split.dim - 2)] = 0;
    }
  }

  const TensorSpec& spec() const { return *input_.spec(); }
  const ConvolutionGeometry& geometry() const { return geometry_; }
  const at::Tensor& weight() const { return weight_; }
  const Steps& steps() const { return steps_; }
  Dims output_padding() const { return list(at_.output_padding()); }
  std::int64_t groups() const { return arguments_[at_.groups].toInt(); }
  ShardingSpec result_sharding() const { return {spec().sharding.mesh, geometry_.layout}; }

  /// This rank's window of the input.
  at::Tensor window() const {
    auto window = input_.local();
    for (const auto& split : geometry_.sharded) {
      window = exchange_along(window, split.dim, split.shards, split.windows, group(split));
    }
    return window;
  }

  /// A tensor like the window, without values: where only its sizes are needed.
  at::Tensor empty_window() const {
    auto sizes = input_.local().sizes().vec();
    for (const auto& split : geometry_.sharded) {
      sizes[static_cast<std::size_t>(split.dim)] =
          split.windows[static_cast<std::size_t>(group(split).rank())].size();
    }
    return at::empty(sizes, input_.local().options());
  }

  /// The gradient of this rank's shard, from those of all windows.
  at::Tensor shard_gradient(at::Tensor gradient) const {
    // In reverse: the halo of a corner went through two exchanges, and its gradient returns the
    // same way.
    for (auto split = geometry_.sharded.rbegin(); split != geometry_.sharded.rend(); ++split) {
      gradient = exchange_along(gradient, split->dim, split->windows, split->shards, group(*split));
    }
    return gradient.contiguous();
  }

 private:
  Dims list(std::size_t place) const {
    return for_each_dim(arguments_[place].toIntVector(), spec().sizes.size() - 2);
  }
  comm::Communicator& group(const ShardedDim& split) const {
    return spec().sharding.mesh.group(split.mesh_dims);
  }

  Arguments arguments_;
  const Positions& at_;
  const DistributedTensorImpl& input_;
  at::Tensor weight_;
  Steps steps_;
  ConvolutionGeometry geometry_;
};

/// convolution(input, weight, bias, stride, padding, dilation, transposed, output padding, groups)
Results run_convolution(Arguments arguments) {
  const SpatialCall call(arguments, kForward);
  const auto sizes = local_sizes(call.result_sharding(), call.geometry().sizes);
  at::Tensor result;
  {
    BelowAutograd guard;
    const auto window = call.window();
    const auto bias = arguments[kBias].isNone() || !arguments[kBias].toTensor().defined()
                          ? std::optional<at::Tensor>()
                          : impl_of(arguments[kBias].toTensor()).local();
    const auto& [stride, padding, dilation] = call.steps();
    result = c10::multiply_integers(sizes) == 0
                 // A rank without results has an empty window, which libtorch does not convolve.
                 ? at::zeros(sizes, window.options())
                 : at::convolution(window, call.weight(), bias, stride, padding, dilation, false,
                                   call.output_padding(), call.groups())
                       .contiguous();
  }
  return {make_distributed(result, call.result_sharding(), call.geometry().sizes)};
}

struct Gradients {
  at::Tensor input, weight, bias;
};

/// From this rank's shard of the result's gradient: the gradient of its window, and its terms of
/// those of weight and bias.
Gradients local_gradients(const SpatialCall& call, const at::Tensor& gradient,
                          const std::array<bool, 3>& mask) {
  const auto window = mask[1] ? call.window() : call.empty_window();
  const auto& weight = call.weight();
  if (gradient.numel() == 0) {
    return {mask[0] ? at::zeros(window.sizes(), window.options()) : at::Tensor(),
            mask[1] ? at::zeros(weight.sizes(), weight.options()) : at::Tensor(),
            mask[2] ? at::zeros({weight.size(0)}, weight.options()) : at::Tensor()};
  }
  const auto& [stride, padding, dilation] = call.steps();
  const Dims channels{weight.size(0)};
  auto [of_window, of_weight, of_bias] = at::convolution_backward(
      gradient, window, weight, mask[2] ? at::OptionalIntArrayRef(channels) : std::nullopt, stride,
      padding, dilation, false, call.output_padding(), call.groups(), mask);
  if (mask[1]) {
    of_weight = of_weight.contiguous();
  }
  return {of_window, of_weight, of_bias};
}

/// convolution_backward(gradient, input, weight, bias sizes, stride, padding, dilation, transposed,
/// output padding, groups, mask)
Results run_convolution_backward(Arguments arguments) {
  const SpatialCall call(arguments, kBackward);
  const auto list = arguments[kMask].toBoolList();
  const std::array<bool, 3> mask{list.get(0), list.get(1), list.get(2)};
  Gradients found;
  {
    BelowAutograd guard;
    const auto& gradient = impl_of(arguments[0].toTensor());
    // The gradient may come in another layout than the result had; bytes_of_convolution_backward
    // has counted that.
    const auto part = redistribute_local(gradient.local(), gradient.spec(), call.geometry().layout);
    found = local_gradients(call, part, mask);
    if (mask[0]) {
      found.input = call.shard_gradient(found.input);
    }
  }
  const auto& sharding = call.spec().sharding;
  const auto layout = sharding.layout;
  std::vector<PartialDim> partials;
  // Each rank has seen its own samples and positions: its gradients of weight and bias are terms of
  // a sum over all ranks that share those out.
  for (const int m : sharding_mesh_dims(layout, all_dims(layout->tensor_ndim()))) {
    partials.push_back({m});
  }
  const auto term = [&](const at::Tensor& local) {
    if (!local.defined()) {
      return at::Tensor();
    }
    const Layout::Dims unsharded(static_cast<std::size_t>(local.dim()));
    return make_distributed(
        local, {sharding.mesh, Layout::intern(layout->mesh_sizes(), unsharded, partials)},
        local.sizes().vec());
  };
  return {mask[0] ? make_distributed(found.input, sharding, call.spec().sizes) : at::Tensor(),
          term(found.weight), term(found.bias)};
}

const AddedForms kSpatialConvolutionForms{
    {"convolution", bytes_of_convolution, run_convolution},
    {"convolution_backward", bytes_of_convolution_backward, run_convolution_backward},
};

}  // namespace

}  // namespace tessera::detail
