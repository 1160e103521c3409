#include "random/pointwise_nodes.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace tessera::detail {
namespace {

/// In the order of std::string, for the search.
constexpr auto kPointwise = std::to_array<std::string_view>({"Abs",
                                                             "Acos",
                                                             "Acosh",
                                                             "Add",
                                                             "Addcdiv",
                                                             "Addcmul",
                                                             "Angle",
                                                             "Asin",
                                                             "Asinh",
                                                             "Atan",
                                                             "Atan2",
                                                             "Atanh",
                                                             "Bernoulli",
                                                             "Ceil",
                                                             "Celu",
                                                             "Clamp",
                                                             "ClampMax",
                                                             "ClampMin",
                                                             "Clone",
                                                             "Complex",
                                                             "Conj",
                                                             "ConjPhysical",
                                                             "Copy",
                                                             "Copysign",
                                                             "Cos",
                                                             "Cosh",
                                                             "Deg2Rad",
                                                             "Digamma",
                                                             "Div",
                                                             "Elu",
                                                             "Erf",
                                                             "Erfc",
                                                             "Erfinv",
                                                             "Exp",
                                                             "Exp2",
                                                             "Expm1",
                                                             "FakeQuantizePerTensorAffineCachemask",
                                                             "Fill",
                                                             "Floor",
                                                             "Fmax",
                                                             "Fmin",
                                                             "Fmod",
                                                             "Frac",
                                                             "FusedDropout",
                                                             "Gelu",
                                                             "Hardshrink",
                                                             "Hardsigmoid",
                                                             "Hardswish",
                                                             "Hardtanh",
                                                             "Hypot",
                                                             "I0",
                                                             "Ldexp",
                                                             "LeakyRelu",
                                                             "Lerp",
                                                             "Lgamma",
                                                             "LiftFresh",
                                                             "Log",
                                                             "Log10",
                                                             "Log1P",
                                                             "Log2",
                                                             "LogSigmoid",
                                                             "Logaddexp",
                                                             "Logaddexp2",
                                                             "Logit",
                                                             "MaskedFill",
                                                             "Maximum",
                                                             "Minimum",
                                                             "Mish",
                                                             "Mul",
                                                             "NanToNum",
                                                             "NativeDropout",
                                                             "Neg",
                                                             "NegView",
                                                             "Nextafter",
                                                             "Polar",
                                                             "Polygamma",
                                                             "Pow",
                                                             "PreluKernel",
                                                             "Rad2Deg",
                                                             "Reciprocal",
                                                             "Relu",
                                                             "Remainder",
                                                             "Round",
                                                             "RreluWithNoise",
                                                             "RreluWithNoiseFunctional",
                                                             "Rsqrt",
                                                             "Rsub",
                                                             "Sgn",
                                                             "Sigmoid",
                                                             "Sign",
                                                             "Silu",
                                                             "Sin",
                                                             "Sinc",
                                                             "Sinh",
                                                             "Softplus",
                                                             "Softshrink",
                                                             "SpecialEntr",
                                                             "SpecialErfcx",
                                                             "SpecialI0E",
                                                             "SpecialI1",
                                                             "SpecialI1E",
                                                             "SpecialLogNdtr",
                                                             "SpecialNdtri",
                                                             "SpecialXlog1Py",
                                                             "Sqrt",
                                                             "Sub",
                                                             "Tan",
                                                             "Tanh",
                                                             "Threshold",
                                                             "ToCopy",
                                                             "Trunc",
                                                             "Where",
                                                             "Xlogy",
                                                             "Zero"});
constexpr auto kReshaping = std::to_array<std::string_view>(
    {"Alias", "Flatten", "ReshapeAlias", "Squeeze", "Unflatten", "UnsafeView", "View"});
static_assert(std::ranges::is_sorted(kPointwise) && std::ranges::is_sorted(kReshaping));

template <class Names>
bool is_among(const torch::autograd::Node& node, const Names& names) {
  std::string name = node.name();
  // A few nodes are named with their namespace.
  name.erase(0, name.rfind(':') == std::string::npos ? 0 : name.rfind(':') + 1);
  const std::size_t end = name.find("Backward");
  // Not an operator's own backward, differentiated again.
  return end != std::string::npos && !name.substr(end).starts_with("BackwardBackward") &&
         std::ranges::binary_search(names, std::string_view(name).substr(0, end));
}

}  // namespace

bool is_pointwise(const torch::autograd::Node& node) {
  return is_among(node, kPointwise);
}

bool is_reshaping(const torch::autograd::Node& node) {
  return is_among(node, kReshaping);
}

}  // namespace tessera::detail
