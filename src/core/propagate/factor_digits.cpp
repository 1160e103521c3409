// Converts digits of a dimension to digits of its factors, and queries these. A rule is written in
// factors, a layout in digits. Where the boundaries of the two do not agree, the dimension cannot
// keep its sharding.
#include "propagate/factor_digits.h"

#include <algorithm>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/zip.hpp>
#include <utility>

#include "layout/digits.h"

namespace tessera {
namespace {

using detail::ceil_div;
using detail::mesh_size;

/// Whether torch.chunk cuts `outer * inner` positions into `parts` where it cuts `outer` positions,
/// each `inner` long.
bool chunks_align(std::int64_t outer, std::int64_t inner, std::int64_t parts) {
  return ceil_div(outer * inner, parts) == ceil_div(outer, parts) * inner;
}

/// Divides `digit` into a major digit of `extent` positions, which is returned, and the rest. Outer
/// mesh dimensions go to the major digit until it is used up, inner ones to the rest.
std::optional<Digit> cut(Digit& digit, std::int64_t extent,
                         std::span<const std::int64_t> mesh_sizes) {
  if (digit.extent % extent != 0) {
    return std::nullopt;
  }
  Digit major{extent, {}};
  Digit minor{digit.extent / extent, {}};
  std::int64_t left = extent;  // of the major digit, in one chunk so far
  // Whether a mesh dimension has cut unevenly. Those behind it would cut chunks of different sizes,
  // whose boundaries no digit describes.
  bool uneven = false;
  for (int mesh_dim : digit.mesh_dims) {
    const std::int64_t parts = mesh_size(mesh_sizes, mesh_dim);
    if (uneven) {
      return std::nullopt;
    }
    // The major digit is used up, so that the mesh dimension cuts within each of its positions.
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
  // The caller continues with the rest for the next factor.
  digit = std::move(minor);
  return major;
}

/// Whether some coordinate gets nothing of `extent` cut over `mesh_dims`. Full chunks have to be
/// looked at as well as the last one: 7 over 2 gives 4 and 3; 3 over 3 gives each coordinate one,
/// but 4 over 3 gives 2, 2 and 0.
bool leaves_nothing(std::int64_t extent, std::span<const int> mesh_dims,
                    std::span<const std::int64_t> mesh_sizes) {
  // An extent of 0 was left by an outer cut: a coordinate without a position.
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
  // The dimension is the factor: also with digits that cut unevenly.
  if (factor_sizes.size() == 1) {
    return FactorDigits{std::move(digits)};
  }
  FactorDigits result(factor_sizes.size());
  auto digit = digits.begin();
  for (auto&& [of_factor, size] : ranges::views::zip(result, factor_sizes)) {
    std::int64_t left = size;  // of the factor, without digits so far
    while (left > 1 && digit != digits.end()) {
      // The digit reaches over the factor's boundary: its front part belongs here, the rest to the
      // next one.
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
  // Digits that are left over belong to no factor.
  return digit == digits.end() ? std::optional(std::move(result)) : std::nullopt;
}

/// From the last digit forwards: the innermost cut of the whole dimension.
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

/// By each mesh dimension in turn: 12 over 2 and 3 is even, 10 over 2 and 3 is not, though 10 over
/// 2 is.
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

}  // namespace tessera
