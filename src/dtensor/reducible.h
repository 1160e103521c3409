#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

#include "tessera/core/layout.h"

namespace tessera::detail {

/// Whether elements of `type` can be reduced so: booleans have no sum, integers no average, and
/// complex numbers only these two, which act on their parts.
bool is_reducible(c10::ScalarType type, ReduceOp op);

/// Throws Error if `layout` is partial with a reduction that elements of `type` do not have.
/// `asked` is what wants it.
void check_partials(const Layout& layout, c10::ScalarType type, std::string_view asked);

}  // namespace tessera::detail
