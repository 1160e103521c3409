#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera::testing {

/// The part of `whole` at a coordinate, as if nothing were partial: by nested chunks of indices.
at::Tensor piece(at::Tensor whole, const Layout& layout,
                 const std::vector<std::int64_t>& coordinate);

/// The local tensor at a coordinate: terms of its part of `whole`, which holds integers. The terms
/// are integers too, no two of one element alike, and replicas hold the same.
at::Tensor local_of(const at::Tensor& whole, const Layout& layout,
                    const std::vector<std::int64_t>& coordinate);

/// For each rank: the reduction of its terms and its peers'. Inner mesh dimensions first.
std::vector<at::Tensor> reduced(std::vector<at::Tensor> locals, const Layout& layout);

}  // namespace tessera::testing
