// Convolutions whose input is split along spatial dimensions: each rank convolves the window of the
// input that its part of the result needs, whose edges ("halos") other ranks hold.

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "../below_autograd.h"
#include "../redistribute.h"
#include "form.h"
#include "halo.h"
#include "parts.h"

namespace tessera::detail {
namespace {

using Arguments = std::span<const c10::IValue>;
using Results = std::vector<c10::IValue>;

/// Where the two operators have what both take: tensors, stride and so on.
struct Places {
  std::size_t input, weight, stride, transposed, groups;
  std::size_t padding() const { return stride + 1; }
  std::size_t dilation() const { return stride + 2; }
  std::size_t output_padding() const { return transposed + 1; }
};
constexpr Places kForward{0, 1, 3, 6, 8}, kBackward{1, 2, 4, 7, 9};
constexpr std::size_t kBias = 2, kMask = 10;

/// Stride and so on of each spatial dimension.
struct Steps {
  Dims stride, padding, dilation;
};

/// A spatial dimension that is split.
struct SplitDim {
  int dim;
  std::vector<int> mesh_dims;
  Ranges parts;    ///< of the input
  Ranges windows;  ///< of the input, that each rank needs: beyond its ends where it is padded
};

/// What a convolution does to a tensor split in space.
struct Geometry {
  std::vector<SplitDim> split;
  Dims sizes;                  ///< of the result, whole
  LayoutPtr layout = nullptr;  ///< of the result
};

/// The lists may have one element for all dimensions.
Dims expanded(Dims values, std::size_t count) {
  if (values.size() == 1) values.resize(count, values.front());
  return values;
}

Ranges windows_of(const Ranges& results, std::int64_t kernel, std::int64_t stride,
                  std::int64_t padding, std::int64_t dilation) {
  Ranges windows;
  for (const auto& part : results) {
    if (part.size() == 0) {
      windows.push_back({});
      continue;
    }
    const auto first = part.begin * stride - padding;
    const auto last = (part.end - 1) * stride - padding;
    windows.push_back({first, last + dilation * (kernel - 1) + 1});
  }
  return windows;
}

Geometry geometry_of(const TensorSpec& input, const Dims& kernel, const Steps& steps) {
  const auto layout = input.sharding.layout;
  Geometry geometry{{}, {input.sizes[0], kernel[0]}, nullptr};
  for (std::size_t dim = 2; dim < input.sizes.size(); ++dim) {
    const auto stride = steps.stride[dim - 2], padding = steps.padding[dim - 2];
    const auto dilation = steps.dilation[dim - 2];
    const auto span = dilation * (kernel[dim] - 1) + 1;
    const auto room = input.sizes[dim] + 2 * padding - span;
    geometry.sizes.push_back(room < 0 ? 0 : room / stride + 1);
    const auto axis = static_cast<int>(dim);
    auto mesh_dims = layout->mesh_dims_of(axis);
    if (mesh_dims.empty()) continue;
    const auto results = parts_along(*layout, axis, geometry.sizes.back());
    geometry.split.push_back({axis, std::move(mesh_dims),
                              parts_along(*layout, axis, input.sizes[dim]),
                              windows_of(results, kernel[dim], stride, padding, dilation)});
  }
  geometry.layout = Layout::intern(layout->mesh_sizes(), layout->dims());
  return geometry;
}

/// Of the exchange of every split dimension, one after another, with the edges that came before.
double bytes_of_exchange(const Geometry& geometry, const TensorSpec& input) {
  const auto largest = [](const Ranges& ranges) {
    return std::ranges::max(ranges, {}, &Range::size).size();
  };
  Dims dims{1};
  double rest = static_cast<double>(c10::elementSize(input.dtype));
  for (const auto& split : geometry.split) {
    dims.push_back(split.dim);
    rest *= static_cast<double>(largest(split.parts));
  }
  rest *= static_cast<double>(local_results(input, dims) * input.sizes[1]);
  double bytes = 0;
  for (const auto& split : geometry.split) {
    rest /= static_cast<double>(largest(split.parts));
    bytes += rest * static_cast<double>(most_sent(split.parts, split.windows));
    rest *= static_cast<double>(largest(split.windows));
  }
  return bytes;
}

bool is_replicated(const DistributedTensorImpl* impl) {
  return impl != nullptr && impl->spec()->sharding.layout->is_replicated();
}

bool is_split_in_space(const TensorSpec& input) {
  const auto layout = input.sharding.layout;
  bool split = false;
  for (int dim = 1; dim < layout->tensor_ndim(); ++dim) {
    const auto cuts = !layout->mesh_dims_of(dim).empty();
    if (cuts && (dim == 1 || layout->digits(dim).size() != 1)) return false;
    split = split || cuts;
  }
  return split;
}

/// What libtorch would refuse it refuses of the gathered call, on all ranks.
bool is_sound(const TensorSpec& input, const TensorSpec& weight, const Steps& steps,
              const Dims& output_padding, std::int64_t groups) {
  const auto spatial = input.sizes.size() - 2;
  const auto all = [](const Dims& values, std::int64_t least) {
    return std::ranges::all_of(values, [&](auto value) { return value >= least; });
  };
  for (const auto* list : {&steps.stride, &steps.padding, &steps.dilation, &output_padding}) {
    if (list->size() != spatial) return false;
  }
  return all(steps.stride, 1) && all(steps.padding, 0) && all(steps.dilation, 1) &&
         all(output_padding, 0) && all(input.sizes, 1) && all(weight.sizes, 1) && groups > 0 &&
         weight.sizes[1] * groups == input.sizes[1] && weight.sizes[0] % groups == 0 &&
         weight.dtype == input.dtype && c10::isFloatingType(input.dtype);
}

/// The geometry of a call that this form covers.
std::optional<Geometry> geometry_of_call(const BoundCall& bound, const Places& at) {
  const auto* input = settled_argument(bound, at.input);
  const auto* weight = settled_argument(bound, at.weight);
  if (input == nullptr || !is_replicated(weight) || bound.call.boolean_or(at.transposed, false)) {
    return std::nullopt;
  }
  const auto& spec = *input->spec();
  const auto& kernel = *weight->spec();
  if (spec.sizes.size() < 3 || spec.sizes.size() != kernel.sizes.size()) return std::nullopt;
  if (!is_split_in_space(spec)) return std::nullopt;
  const auto list = [&](std::size_t place) {
    return expanded(bound.call.integers(place), spec.sizes.size() - 2);
  };
  const Steps steps{list(at.stride), list(at.padding()), list(at.dilation())};
  if (!is_sound(spec, kernel, steps, list(at.output_padding()), bound.call.integer(at.groups))) {
    return std::nullopt;
  }
  auto geometry = geometry_of(spec, kernel.sizes, steps);
  if (std::ranges::find(geometry.sizes, 0) != geometry.sizes.end()) return std::nullopt;
  return geometry;
}

std::optional<double> bytes_of_convolution(const BoundCall& bound) {
  const auto geometry = geometry_of_call(bound, kForward);
  if (!geometry) return std::nullopt;
  const auto& input = *settled_argument(bound, kForward.input)->spec();
  if (!bound.call.is_none(kBias)) {
    const auto* bias = settled_argument(bound, kBias);
    if (!is_replicated(bias) || bias->spec()->dtype != input.dtype ||
        bias->spec()->sizes != Dims{geometry->sizes[1]}) {
      return std::nullopt;
    }
  }
  return bytes_of_exchange(*geometry, input);
}

std::optional<double> bytes_of_convolution_backward(const BoundCall& bound) {
  const auto geometry = geometry_of_call(bound, kBackward);
  if (!geometry || !bound.call.has_tensor(0)) return std::nullopt;
  const auto* gradient =
      as_distributed(bound.tensors[static_cast<std::size_t>(bound.call.tensor_index(0))]);
  const auto& input = *settled_argument(bound, kBackward.input)->spec();
  if (gradient == nullptr || gradient->spec()->sizes != geometry->sizes ||
      gradient->spec()->dtype != input.dtype) {
    return std::nullopt;
  }
  const auto mask = bound.call.integers(kMask);
  // The window for the weight's gradient, and that of the input's back.
  const auto exchanges = static_cast<double>((mask.at(0) != 0) + (mask.at(1) != 0));
  return static_cast<double>(plan_for(gradient->spec(), geometry->layout)->bytes()) +
         exchanges * bytes_of_exchange(*geometry, input);
}

/// One call on this rank. Padding along split dimensions is part of the window already.
class Call {
 public:
  Call(Arguments arguments, const Places& at)
      : arguments_(arguments),
        at_(at),
        input_(impl_of(arguments[at.input].toTensor())),
        weight_(impl_of(arguments[at.weight].toTensor()).local()),
        steps_{list(at.stride), list(at.padding()), list(at.dilation())},
        geometry_(geometry_of(spec(), weight_.sizes().vec(), steps_)) {
    for (const auto& split : geometry_.split) {
      steps_.padding[static_cast<std::size_t>(split.dim - 2)] = 0;
    }
  }

  const TensorSpec& spec() const { return *input_.spec(); }
  const Geometry& geometry() const { return geometry_; }
  const at::Tensor& weight() const { return weight_; }
  const Steps& steps() const { return steps_; }
  Dims output_padding() const { return list(at_.output_padding()); }
  std::int64_t groups() const { return arguments_[at_.groups].toInt(); }
  ShardingSpec result_sharding() const { return {spec().sharding.mesh, geometry_.layout}; }

  /// This rank's window of the input.
  at::Tensor window() const {
    auto window = input_.local();
    for (const auto& split : geometry_.split) {
      window = exchange_along(window, split.dim, split.parts, split.windows, group(split));
    }
    return window;
  }

  /// One like it, of any values.
  at::Tensor window_of_nothing() const {
    auto sizes = input_.local().sizes().vec();
    for (const auto& split : geometry_.split) {
      sizes[static_cast<std::size_t>(split.dim)] =
          split.windows[static_cast<std::size_t>(group(split).rank())].size();
    }
    return at::empty(sizes, input_.local().options());
  }

  /// The gradient of this rank's part, from those of all windows.
  at::Tensor gathered_back(at::Tensor gradient) const {
    for (auto split = geometry_.split.rbegin(); split != geometry_.split.rend(); ++split) {
      gradient = exchange_along(gradient, split->dim, split->windows, split->parts, group(*split));
    }
    return gradient.contiguous();
  }

 private:
  Dims list(std::size_t place) const {
    return expanded(arguments_[place].toIntVector(), spec().sizes.size() - 2);
  }
  comm::Communicator& group(const SplitDim& split) const {
    return spec().sharding.mesh.group(split.mesh_dims);
  }

  Arguments arguments_;
  const Places& at_;
  const DistributedTensorImpl& input_;
  at::Tensor weight_;
  Steps steps_;
  Geometry geometry_;
};

/// convolution(input, weight, bias, stride, padding, dilation, transposed, output padding, groups)
Results run_convolution(Arguments arguments) {
  const Call call(arguments, kForward);
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

/// From this rank's part of the result's gradient: of its window, and its terms of the others.
Gradients local_gradients(const Call& call, const at::Tensor& gradient,
                          const std::array<bool, 3>& mask) {
  const auto window = mask[1] ? call.window() : call.window_of_nothing();
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
  if (mask[1]) of_weight = of_weight.contiguous();
  return {of_window, of_weight, of_bias};
}

/// convolution_backward(gradient, input, weight, bias sizes, stride, padding, dilation, transposed,
/// output padding, groups, mask)
Results run_convolution_backward(Arguments arguments) {
  const Call call(arguments, kBackward);
  const auto list = arguments[kMask].toBoolList();
  const std::array<bool, 3> mask{list.get(0), list.get(1), list.get(2)};
  Gradients found;
  {
    BelowAutograd guard;
    const auto& gradient = impl_of(arguments[0].toTensor());
    const auto part = redistribute_local(gradient.local(), gradient.spec(), call.geometry().layout);
    found = local_gradients(call, part, mask);
    if (mask[0]) found.input = call.gathered_back(found.input);
  }
  const auto& sharding = call.spec().sharding;
  const auto layout = sharding.layout;
  std::vector<PartialDim> pending;
  for (const int m : splitting(layout, all_dims(layout->tensor_ndim()))) pending.push_back({m});
  const auto term = [&](const at::Tensor& local) {
    if (!local.defined()) return at::Tensor();
    const Layout::Dims whole(static_cast<std::size_t>(local.dim()));
    return make_distributed(local,
                            {sharding.mesh, Layout::intern(layout->mesh_sizes(), whole, pending)},
                            local.sizes().vec());
  };
  return {mask[0] ? make_distributed(found.input, sharding, call.spec().sizes) : at::Tensor(),
          term(found.weight), term(found.bias)};
}

constexpr std::array kSpatialConvolutionForms{
    Form{"convolution", bytes_of_convolution, run_convolution},
    Form{"convolution_backward", bytes_of_convolution_backward, run_convolution_backward},
};

}  // namespace

std::span<const Form> spatial_convolution_forms() {
  return kSpatialConvolutionForms;
}

}  // namespace tessera::detail
