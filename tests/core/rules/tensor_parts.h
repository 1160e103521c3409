#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/detail/layout.h"

namespace tessera::testing {

using Coordinate = std::vector<std::int64_t>;

/// All coordinates of a mesh, in the order of its ranks.
std::vector<Coordinate> coordinates(const std::vector<std::int64_t>& mesh);

/// Double precision, if all tensors have it.
double tolerance_of(const std::vector<at::Tensor>& tensors);
/// Whether sizes, types and, within the tolerance, values are the same.
bool agree(const at::Tensor& a, const at::Tensor& b, double tolerance);

/// The positions of a dimension of this size that a coordinate owns.
at::Tensor index_of(const Layout& layout, int dim, std::int64_t size, const Coordinate& at);
/// The local part of `tensor` at a coordinate; for partial layouts, terms that differ between
/// coordinates.
at::Tensor part(const at::Tensor& tensor, const Layout& layout, const Coordinate& at);
/// Puts the parts together; `problem` says where replicas differ or elements are missing.
at::Tensor assemble(std::vector<Coordinate> at, std::vector<at::Tensor> locals,
                    const Layout& layout, const std::vector<std::int64_t>& sizes, double tolerance,
                    std::string& problem);

}  // namespace tessera::testing
