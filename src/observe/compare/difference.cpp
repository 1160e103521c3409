#include "compare/difference.h"

#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::observe {
namespace {

/// Zeros that are sums of many terms are off by several roundings.
constexpr double kRoundingsOfSums = 32;

/// For arithmetic without a further rounding.
at::Tensor as_doubles(const at::Tensor& tensor) {
  return (tensor.is_complex() ? at::view_as_real(tensor) : tensor).to(at::kDouble);
}

/// The element that differs most, and how that compares with what is allowed.
struct Worst {
  double excess = 0;  ///< difference / allowed; at most 1: they agree
  double allowed = 0;
  std::vector<std::int64_t> at{};
  double value = 0, recorded = 0, largest = 0;
  std::string rank{};
};

Worst worst_of(const Whole& whole, const at::Tensor& recorded, const Allowance& allowance) {
  Worst worst{.rank = whole.rank};
  if (recorded.numel() == 0) {
    return worst;
  }
  const Farthest found = farthest(whole.tensor, recorded);
  const double epsilon =
      std::max(epsilon_of(whole.tensor.scalar_type()), epsilon_of(recorded.scalar_type()));
  worst.largest = largest_of(recorded);
  worst.allowed = allowance.share.value_or(std::sqrt(epsilon)) * worst.largest +
                  kRoundingsOfSums * epsilon * allowance.magnitude;
  worst.excess = found.distance == 0 ? 0
                 : worst.allowed > 0 ? found.distance / worst.allowed
                                     : std::numeric_limits<double>::infinity();
  worst.at = coordinate_of(found.index, recorded.sizes());
  worst.value = found.value;
  worst.recorded = found.recorded;
  return worst;
}

/// With copies of heads taken apart or added up, where that gives a tensor of `sizes`.
Reading without_copies(const Reading& reading, at::IntArrayRef shard, at::IntArrayRef sizes,
                       Copies copies) {
  Reading once;
  for (const auto& [tensor, rank] : reading) {
    const at::Tensor stacked = copies_of_heads(tensor, shard, sizes);
    if (!stacked.defined()) {
      once.push_back({tensor, rank});
    } else if (copies == Copies::kTerms) {
      once.push_back({stacked.sum(0), rank});
    } else {
      for (const at::Tensor& copy : stacked.unbind()) {
        once.push_back({copy, rank});
      }
    }
  }
  return once;
}

/// The largest difference over all copies; nullopt if one has other sizes.
std::optional<Worst> worst_of(const Reading& reading, const at::Tensor& recorded,
                              const Allowance& allowance) {
  Worst worst;
  for (const Whole& whole : reading) {
    if (whole.tensor.sizes() != recorded.sizes()) {
      return std::nullopt;
    }
    Worst each = worst_of(whole, recorded, allowance);
    if (each.excess > worst.excess) {
      worst = std::move(each);
    }
  }
  return worst;
}

std::string describe(const Worst& worst) {
  return fmt::format(
      "at [{}]{} it is {:.9g}, recorded {:.9g} (off by {:.3g}; of values up to {:.3g} "
      "{:.3g} is allowed)",
      fmt::join(worst.at, ", "), worst.rank.empty() ? "" : " on rank " + worst.rank, worst.value,
      worst.recorded, std::abs(worst.value - worst.recorded), worst.largest, worst.allowed);
}

}  // namespace

double epsilon_of(c10::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kFloat:
      return std::numeric_limits<float>::epsilon();
    case at::kHalf:
      return 1.0 / (1 << 10);
    case at::kBFloat16:
      return 1.0 / (1 << 7);
    default:
      return 0;
  }
}

std::vector<std::int64_t> coordinate_of(std::int64_t index, at::IntArrayRef sizes) {
  std::vector<std::int64_t> coordinate(sizes.size());
  for (std::size_t dim = sizes.size(); dim-- > 0;) {
    coordinate[dim] = index % sizes[dim];
    index /= sizes[dim];
  }
  return coordinate;
}

Farthest farthest(const at::Tensor& tensor, const at::Tensor& recorded) {
  if (recorded.numel() == 0) {
    return {};
  }
  const at::Tensor ours = as_doubles(tensor);
  const at::Tensor theirs = as_doubles(recorded);
  const at::Tensor same = ours.eq(theirs).logical_or(ours.isnan().logical_and(theirs.isnan()));
  const at::Tensor apart = at::where(same, at::zeros_like(ours), ours.sub(theirs).abs())
                               .nan_to_num(std::numeric_limits<double>::infinity())
                               .flatten();
  const auto index = apart.argmax().item<std::int64_t>();
  return {apart[index].item<double>(), recorded.is_complex() ? index / 2 : index,
          ours.flatten()[index].item<double>(), theirs.flatten()[index].item<double>()};
}

double largest_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  return as_doubles(tensor).nan_to_num(0, 0, 0).abs().max().item<double>();
}

std::optional<std::string> difference(const RankParts& parts, const RankParts& recorded,
                                      const Allowance& allowance, Copies copies) {
  std::optional<Worst> least;
  for (const Reading& theirs : readings(recorded)) {
    const at::Tensor& whole = theirs.front().tensor;
    for (const Reading& ours : readings(parts)) {
      std::optional<Worst> worst =
          worst_of(without_copies(ours, parts.shard, whole.sizes(), copies), whole, allowance);
      if (worst && (!least || worst->excess < least->excess)) {
        least = std::move(worst);
      }
    }
  }
  if (!least) {
    return fmt::format("its sizes do not fit: a rank has [{}], recorded was [{}]",
                       fmt::join(parts.tensors.front().sizes(), ", "),
                       fmt::join(recorded.tensors.front().sizes(), ", "));
  }
  return least->excess > 1 ? std::optional(describe(*least)) : std::nullopt;
}

}  // namespace tessera::observe
