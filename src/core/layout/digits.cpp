// Digits and factors. A sharding rule is written in factors, a layout in digits. If the boundaries
// of factors and digits do not agree, the tensor dimension cannot keep its sharding.

#include "layout/digits.h"

#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <utility>

namespace tessera::detail {
namespace {

/// Whether torch.chunk divides `outer * inner` positions at the same boundaries as `outer` blocks
/// of `inner` positions.
bool chunks_align(std::int64_t outer, std::int64_t inner, std::int64_t parts) {
  return ceil_div(outer * inner, parts) == ceil_div(outer, parts) * inner;
}

/// Splits `digit` in two: a major digit of `extent` positions, which is returned, and a minor
/// digit, which remains in `digit`. Outer mesh dimensions go to the major digit until they divide
/// it into single positions; inner mesh dimensions go to the minor digit.
std::optional<Digit> cut(Digit& digit, std::int64_t extent,
                         std::span<const std::int64_t> mesh_sizes) {
  if (digit.extent % extent != 0) {
    return std::nullopt;
  }
  Digit major{extent, {}};
  Digit minor{digit.extent / extent, {}};
  // Number of positions of the major digit in one chunk that are not divided yet.
  std::int64_t left = extent;
  // Whether a mesh dimension has divided the digit unevenly. Later mesh dimensions would then
  // divide chunks of different sizes, whose boundaries no digit describes.
  bool uneven = false;
  for (int mesh_dim : digit.mesh_dims) {
    const std::int64_t parts = mesh_size(mesh_sizes, mesh_dim);
    if (uneven) {
      return std::nullopt;
    }
    // The mesh dimensions so far divide the major digit into single positions, so this mesh
    // dimension divides the minor digit.
    if (left == 1) {
      minor.mesh_dims.push_back(mesh_dim);
      continue;
    }
    if (!chunks_align(left, minor.extent, parts)) {
      return std::nullopt;
    }
    uneven = left % parts != 0;
    left = ceil_div(left, parts);
    major.mesh_dims.push_back(mesh_dim);
  }
  digit = std::move(minor);
  return major;
}

/// Whether some rank gets no position if `extent` positions are divided over `mesh_dims`. Full
/// chunks must be checked as well as the last one: 7 over 2 gives 4 and 3; dividing the 3 over 3
/// ranks gives each rank one position, but dividing the 4 gives 2, 2 and 0.
bool leaves_nothing(std::int64_t extent, std::span<const int> mesh_dims,
                    std::span<const std::int64_t> mesh_sizes) {
  // An extent of 0 is the result of an outer division that leaves a rank without positions.
  if (mesh_dims.empty() || extent == 0) {
    return extent == 0;
  }
  const std::int64_t parts = mesh_size(mesh_sizes, mesh_dims.front());
  const std::int64_t chunk = ceil_div(extent, parts);
  const std::int64_t last = std::max<std::int64_t>(extent - chunk * (parts - 1), 0);
  const auto inner = mesh_dims.subspan(1);
  return leaves_nothing(last, inner, mesh_sizes) || leaves_nothing(chunk, inner, mesh_sizes);
}

}  // namespace

std::optional<FactorDigits> align_digits(std::vector<Digit> digits,
                                         std::span<const std::int64_t> factor_sizes,
                                         std::span<const std::int64_t> mesh_sizes) {
  // If the dimension is a single factor, the factor has the digits of the dimension, even with
  // uneven division.
  if (factor_sizes.size() == 1) {
    return FactorDigits{std::move(digits)};
  }
  FactorDigits result(factor_sizes.size());
  auto digit = digits.begin();
  for (auto&& [of_factor, size] : ranges::views::zip(result, factor_sizes)) {
    std::int64_t left = size;  // number of positions of the factor that no digit covers yet
    while (left > 1 && digit != digits.end()) {
      // The first part of the digit belongs to this factor, the rest belongs to the next factor.
      if (digit->extent > left) {
        std::optional<Digit> major = cut(*digit, left, mesh_sizes);
        if (!major) {
          return std::nullopt;
        }
        of_factor.push_back(*std::move(major));
        left = 1;
        continue;
      }
      if (digit->extent == 0 || left % digit->extent != 0) {
        return std::nullopt;
      }
      left /= digit->extent;
      of_factor.push_back(std::move(*digit++));
    }
  }
  // nullopt if digits remain, because they would belong to no factor.
  return digit == digits.end() ? std::optional(std::move(result)) : std::nullopt;
}

int drop_innermost(std::vector<Digit>& digits) {
  for (Digit& digit : digits | ranges::views::reverse) {
    if (digit.mesh_dims.empty()) {
      continue;
    }
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
      const std::int64_t parts = mesh_size(mesh_sizes, mesh_dim);
      if (left % parts != 0) {
        return false;
      }
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

}  // namespace tessera::detail
