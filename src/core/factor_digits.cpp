#include "factor_digits.h"

#include <algorithm>
#include <cstddef>
#include <range/v3/view/reverse.hpp>
#include <utility>

namespace tessera {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::int64_t size_of(std::span<const std::int64_t> mesh_sizes, int mesh_dim) {
  return mesh_sizes[static_cast<std::size_t>(mesh_dim)];
}

/// Whether torch.chunk cuts `outer * inner` positions into `parts` where it cuts `outer` ones.
bool chunks_align(std::int64_t outer, std::int64_t inner, std::int64_t parts) {
  return ceil_div(outer * inner, parts) == ceil_div(outer, parts) * inner;
}

/// Cuts `digit` into its major part of `extent` positions, which is returned, and the rest.
std::optional<Digit> cut(Digit& digit, std::int64_t extent,
                         std::span<const std::int64_t> mesh_sizes) {
  if (digit.extent % extent != 0) return std::nullopt;
  Digit major{extent, {}};
  Digit minor{digit.extent / extent, {}};
  std::int64_t left = extent;  // of the major part, not split yet
  bool uneven = false;
  for (int mesh_dim : digit.mesh_dims) {
    const std::int64_t parts = size_of(mesh_sizes, mesh_dim);
    if (uneven) return std::nullopt;
    if (left == 1) {
      minor.mesh_dims.push_back(mesh_dim);
      continue;
    }
    if (!chunks_align(left, minor.extent, parts)) return std::nullopt;
    uneven = left % parts != 0;
    left = ceil_div(left, parts);
    major.mesh_dims.push_back(mesh_dim);
  }
  digit = std::move(minor);
  return major;
}

/// Whether some coordinate gets nothing of `extent` split over `mesh_dims`. The full chunks are to
/// be looked at as well as the last one: 7 over 2 is 4 and 3, of which it is 4 that 3 leaves short.
bool leaves_nothing(std::int64_t extent, std::span<const int> mesh_dims,
                    std::span<const std::int64_t> mesh_sizes) {
  if (mesh_dims.empty() || extent == 0) return extent == 0;
  const std::int64_t parts = size_of(mesh_sizes, mesh_dims.front());
  const std::int64_t chunk = ceil_div(extent, parts);
  const std::int64_t last = std::max<std::int64_t>(extent - chunk * (parts - 1), 0);
  const auto inner = mesh_dims.subspan(1);
  return leaves_nothing(last, inner, mesh_sizes) || leaves_nothing(chunk, inner, mesh_sizes);
}

}  // namespace

std::optional<FactorDigits> align_digits(std::vector<Digit> digits,
                                         std::span<const std::int64_t> factor_sizes,
                                         std::span<const std::int64_t> mesh_sizes) {
  if (factor_sizes.size() == 1) return FactorDigits{std::move(digits)};
  FactorDigits result(factor_sizes.size());
  std::size_t at = 0;
  for (std::size_t factor = 0; factor < factor_sizes.size(); ++factor) {
    std::int64_t left = factor_sizes[factor];
    while (left > 1 && at < digits.size()) {
      Digit& digit = digits[at];
      if (digit.extent > left) {
        std::optional<Digit> major = cut(digit, left, mesh_sizes);
        if (!major) return std::nullopt;
        result[factor].push_back(*std::move(major));
        left = 1;
      } else {
        if (digit.extent == 0 || left % digit.extent != 0) return std::nullopt;
        left /= digit.extent;
        result[factor].push_back(std::move(digit));
        ++at;
      }
    }
  }
  return at == digits.size() ? std::optional(std::move(result)) : std::nullopt;
}

int drop_innermost(std::vector<Digit>& digits) {
  for (Digit& digit : digits | ranges::views::reverse) {
    if (digit.mesh_dims.empty()) continue;
    const int mesh_dim = digit.mesh_dims.back();
    digit.mesh_dims.pop_back();
    return mesh_dim;
  }
  return -1;
}

bool splits_evenly(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes) {
  for (const Digit& digit : digits) {
    std::int64_t left = digit.extent;
    for (int mesh_dim : digit.mesh_dims) {
      const std::int64_t parts = size_of(mesh_sizes, mesh_dim);
      if (left % parts != 0) return false;
      left /= parts;
    }
  }
  return true;
}

bool splits_to_nothing(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes) {
  return std::any_of(digits.begin(), digits.end(), [&](const Digit& digit) {
    return leaves_nothing(digit.extent, digit.mesh_dims, mesh_sizes);
  });
}

}  // namespace tessera
