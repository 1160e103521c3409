#pragma once

#include "tessera/core/layout.h"

namespace tessera::detail {

/// The layout with every mesh dimension of size 1 replicated: each coordinate holds the same
/// values.
LayoutPtr without_unit_mesh_dims(LayoutPtr layout);

}  // namespace tessera::detail
