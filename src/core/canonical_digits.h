#pragma once

#include <cstdint>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera::detail {

/// The product of the sizes of `mesh_dims`.
std::int64_t mesh_product(const std::vector<std::int64_t>& mesh_sizes,
                          const std::vector<int>& mesh_dims);

/// The one spelling of `digits` (see Layout): digits that together are one digit are merged, also
/// where that only shows from the sizes, as in [2 over dp][8] = [16 over dp] for dp=2.
std::vector<Digit> canonical_digits(const std::vector<std::int64_t>& mesh_sizes,
                                    std::vector<Digit> digits);

}  // namespace tessera::detail
