#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compare/rank_parts.h"

namespace tessera::observe {

/// How large a difference may be: `share` of the largest value of the tensor (default: the square
/// root of the type's epsilon), and besides what rounding makes of zeros: a few epsilons of
/// `magnitude`, the largest value of the tensors of its kind.
struct Allowance {
  std::optional<double> share{};
  double magnitude = 0;
};

/// What several copies of a head are to the recorded one.
enum class Copies { kEqual, kTerms };

/// How `parts` and `recorded` differ, in the common reading in which they differ least: one line.
/// nullopt: they agree. Copies of heads of a distributed tensor must each be the recorded one, or
/// add up to it.
std::optional<std::string> difference(const RankParts& parts, const RankParts& recorded,
                                      const Allowance& allowance, Copies copies = Copies::kEqual);

/// The largest finite absolute value; 0 of an empty tensor.
double largest_of(const at::Tensor& tensor);

/// The distance from 1 to the next number of a tensor's type; 0 of integers, which are exact.
double epsilon_of(c10::ScalarType type);

/// The element in which two tensors of the same sizes are furthest apart, the first of equals.
struct Farthest {
  double distance = 0;     ///< infinity beside a NaN or an infinity that the other has not
  std::int64_t index = 0;  ///< in row-major order
  double value = 0, recorded = 0;
};

/// NaN beside NaN and infinity beside itself are equal; NaN beside a number is not.
Farthest farthest(const at::Tensor& tensor, const at::Tensor& recorded);

/// The coordinate of an element of a tensor of `sizes`.
std::vector<std::int64_t> coordinate_of(std::int64_t index, at::IntArrayRef sizes);

}  // namespace tessera::observe
