// Quantiles of distributed tensors. libtorch composes them of others, too, but reads the sorted
// values' memory where few of many are asked for.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "overrides/composite_kernels.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/composite_kernels.h"
#include "tessera/internals/detail/quantile_ranks.h"

namespace tessera::detail {
namespace {

enum class Nan : std::uint8_t { kCounts, kIsSkipped };

using Dim = std::optional<std::int64_t>;

/// The whole numbers up to this one are floats.
constexpr std::int64_t kWholeFloats = 1 << 24;

/// libtorch's checks, with its messages.
void check_arguments(const at::Tensor& self, const at::Tensor& q, std::string_view interpolation) {
  constexpr std::array<std::string_view, 5> kInterpolations{"linear", "lower", "higher", "midpoint",
                                                            "nearest"};
  TORCH_CHECK(self.numel() > 0, "quantile() input tensor must be non-empty");
  TORCH_CHECK(q.dim() <= 1, "quantile() q must be a scalar or 1D tensor");
  TORCH_CHECK(self.scalar_type() == at::kFloat || self.scalar_type() == at::kDouble,
              "quantile() input tensor must be either float or double dtype");
  TORCH_CHECK(self.scalar_type() == q.scalar_type(),
              "quantile() q tensor must be same dtype as the input tensor");
  TORCH_CHECK(self.device() == q.device(),
              "quantile() q tensor must be on the same device as the input tensor");
  TORCH_CHECK(std::ranges::find(kInterpolations, interpolation) != kInterpolations.end(),
              "quantile() interpolation must be one of linear, lower, higher, midpoint or nearest, "
              "but got ",
              interpolation);
  // A device is not waited for.
  TORCH_CHECK(!self.is_cpu() || q.ge(0).logical_and(q.le(1)).all().item<bool>(),
              "quantile() q values must be in the range [0, 1]");
}

/// For each row of sorted values where the quantiles stand, from 0 for the smallest. A row with a
/// NaN that counts is NaN, and so is its largest value.
at::Tensor ranks_of(const at::Tensor& sorted, const at::Tensor& q, Nan nan) {
  const auto type = type_of_quantile_ranks(sorted.scalar_type());
  TORCH_CHECK(type == at::kDouble || sorted.size(-1) <= kWholeFloats,
              "quantile() input tensor is too large");
  const at::Tensor quantiles = q.reshape({-1}).to(type);
  const at::Tensor missing = sorted.isnan();
  if (nan == Nan::kIsSkipped) {
    const at::Tensor last = missing.logical_not().sum(-1, true).sub(1).to(type);
    return last.mul(quantiles).clamp_min(0);
  }
  const auto last = static_cast<double>(sorted.size(-1) - 1);
  return at::where(missing.any(-1, true), last, quantiles.mul(last));
}

/// The values in the sorted rows at those places, or between two values.
at::Tensor values_at(const at::Tensor& sorted, at::Tensor ranks, std::string_view interpolation) {
  if (interpolation == "nearest") {
    ranks = ranks.round();
  } else if (interpolation == "lower") {
    ranks = ranks.floor();
  } else if (interpolation == "higher") {
    ranks = ranks.ceil();
  }
  const at::Tensor below = ranks.to(at::kLong);
  at::Tensor lower = sorted.gather(-1, below);
  if (interpolation != "linear" && interpolation != "midpoint") {
    return lower;
  }
  const at::Tensor upper = sorted.gather(-1, ranks.ceil().to(at::kLong));
  return interpolation == "midpoint" ? lower.lerp(upper, 0.5)
                                     : lower.lerp(upper, ranks.sub(below).to(sorted.scalar_type()));
}

at::Tensor compose(const at::Tensor& self, const at::Tensor& q, Dim dim, bool keepdim,
                   std::string_view interpolation, Nan nan) {
  check_arguments(self, q, interpolation);
  const bool of_all = !dim || self.dim() == 0;
  const std::int64_t along = dim.value_or(0);
  const at::Tensor rows = of_all ? self.flatten() : self.movedim(along, -1);
  const at::Tensor sorted = std::get<0>(rows.sort());
  at::Tensor found = values_at(sorted, ranks_of(sorted, q, nan), interpolation).movedim(-1, 0);
  if (keepdim && !of_all) {
    found = found.unsqueeze(along < 0 ? along : along + 1);
  }
  for (std::int64_t i = 0; keepdim && of_all && i < self.dim(); ++i) {
    found = found.unsqueeze(-1);
  }
  return q.dim() == 0 ? found.squeeze(0) : found;
}

/// q is made of a number by libtorch's rule: in the type of the values.
at::Tensor as_tensor(double q, const at::Tensor& self) {
  TORCH_CHECK(q >= 0 && q <= 1, "quantile() q must be in the range [0, 1] but got ", q);
  return at::scalar_tensor(q, self.options());
}

std::string name_of(Nan nan) {
  return nan == Nan::kCounts ? "aten::quantile" : "aten::nanquantile";
}

/// libtorch's composition, for plain tensors.
template <Nan kNan, class... Arguments>
at::Tensor plain(const Arguments&... arguments) {
  if constexpr (kNan == Nan::kCounts) {
    return composite::quantile(arguments...);
  } else {
    return composite::nanquantile(arguments...);
  }
}

template <Nan kNan, class... Arguments>
at::Tensor& plain_out(at::Tensor& out, const Arguments&... arguments) {
  if constexpr (kNan == Nan::kCounts) {
    return composite::quantile_out(out, arguments...);
  } else {
    return composite::nanquantile_out(out, arguments...);
  }
}

template <Nan kNan>
at::Tensor quantiles(const at::Tensor& self, const at::Tensor& q, Dim dim, bool keepdim,
                     c10::string_view interpolation) {
  if (!tessera::is_distributed(self) && !tessera::is_distributed(q)) {
    return plain<kNan>(self, q, dim, keepdim, interpolation);
  }
  check_mixing(name_of(kNan), {self, q});
  std::optional<ReplicationScope> scope;
  if (has_only_distributed({self, q})) {
    scope.emplace();
  }
  return compose(self, q, dim, keepdim, interpolation, kNan);
}

template <Nan kNan>
at::Tensor quantile(const at::Tensor& self, double q, Dim dim, bool keepdim,
                    c10::string_view interpolation) {
  if (!tessera::is_distributed(self)) {
    return plain<kNan>(self, q, dim, keepdim, interpolation);
  }
  return quantiles<kNan>(self, as_tensor(q, self), dim, keepdim, interpolation);
}

/// `Q`: one number, or a tensor of several.
template <Nan kNan, auto kOperator, class Q>
at::Tensor& write_out(const at::Tensor& self, Q q, Dim dim, bool keepdim,
                      c10::string_view interpolation, at::Tensor& out) {
  if (!tessera::is_distributed(out)) {
    return plain_out<kNan>(out, self, q, dim, keepdim, interpolation);
  }
  return copy_to(out, kOperator(self, q, dim, keepdim, interpolation),
                 (name_of(kNan) + ".out").c_str());
}

template <Nan kNan>
void implement(torch::Library& library) {
  const std::string name = name_of(kNan);
  library.impl(name.c_str(), &quantiles<kNan>);
  library.impl((name + ".scalar").c_str(), &quantile<kNan>);
  library.impl((name + ".out").c_str(), &write_out<kNan, quantiles<kNan>, const at::Tensor&>);
  library.impl((name + ".scalar_out").c_str(), &write_out<kNan, quantile<kNan>, double>);
}

}  // namespace

void implement_quantiles(torch::Library& library) {
  implement<Nan::kCounts>(library);
  implement<Nan::kIsSkipped>(library);
}

}  // namespace tessera::detail
