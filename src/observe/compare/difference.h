#pragma once

#include <optional>
#include <string>
#include <vector>

#include "compare/parts.h"

namespace tessera::observe {

/// How large a difference may be: `share` of the largest value of the tensor (default: the square
/// root of the type's epsilon), and besides what rounding makes of zeros: a few epsilons of
/// `magnitude`, the largest value of the tensors of its kind.
struct Allowance {
  std::optional<double> share{};
  double magnitude = 0;
};

/// What `parts` and `recorded` differ by where they can be read alike, in the way in which they
/// differ least: one line. nullopt: they agree.
std::optional<std::string> difference(const Parts& parts, const Parts& recorded,
                                      const Allowance& allowance);

/// The largest finite absolute value; 0 of an empty tensor.
double largest_of(const at::Tensor& tensor);

}  // namespace tessera::observe
