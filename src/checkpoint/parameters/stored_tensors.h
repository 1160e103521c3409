#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/nn/parameter.h"

namespace tessera::checkpoint {

/// A tensor of the files: a parameter, or the rows of a fused one that belong to one of its parts
/// (nn::StoredParts).
struct StoredTensor {
  std::string name;
  std::vector<std::int64_t> sizes;
  // Its rows in the parameter: one run in each group, and the groups one after another.
  std::int64_t first = 0;       ///< first row of the run in the first group
  std::int64_t run = 0;         ///< rows of a run
  std::int64_t group_rows = 0;  ///< from one run's begin to the next
  std::int64_t groups = 1;

  /// With rows [from, from + rows) of a block, and the row of this tensor where they begin.
  using VisitRows = std::function<void(std::int64_t row, std::int64_t from, std::int64_t rows)>;
  /// Calls `visit` for the overlap of rows [first_row, first_row + rows) of the parameter with this
  /// tensor, which is a part of it.
  void visit_rows(std::int64_t first_row, std::int64_t rows, const VisitRows& visit) const;
  /// Whether this is all of the parameter.
  bool is_whole() const { return group_rows == 0; }

  /// With an offset in this tensor, and the part of `block` that goes there.
  using Visit = std::function<void(std::span<const std::int64_t> offset, const at::Tensor& part)>;
  /// Calls `visit` for the overlap of a block of the parameter at `offset` with this tensor.
  void visit(std::span<const std::int64_t> offset, const at::Tensor& block,
             const Visit& visit) const;
};

/// The tensors that files store a parameter as: under its FQN, or by parts, whose modules are
/// beside the parameter's module ("layers.0.qkv.weight" as "layers.0.q.weight" and so on).
std::vector<StoredTensor> stored_tensors(const std::string& fqn, const nn::ParameterSlot& slot);

}  // namespace tessera::checkpoint
