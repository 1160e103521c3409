// The ranks' parts of one tensor, and how they form a whole one.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::observe {

/// The ranks of a mesh by their part of the batch. Ranks of one part are consecutive.
struct BatchGrid {
  BatchGrid(const DeviceMesh& mesh, const std::vector<std::string>& batch_dims);

  std::int64_t batches = 1;            ///< parts of the batch
  std::vector<std::size_t> positions;  ///< in mesh.ranks(), part by part
};

/// A tensor of one run: each rank's part, on the CPU.
struct RankParts {
  std::int64_t batches = 1;         ///< how many parts of the batch; 1: it does not depend on them
  std::vector<std::string> ranks;   ///< those with each part, for messages
  std::vector<at::Tensor> tensors;  ///< one a rank, part by part; equal ones may be one
  std::vector<std::int64_t>
      shard{};  ///< sizes of a rank's share of a distributed tensor; none: plain
};

/// All ranks' plain `own`, undefined where a rank has none. Collective over the mesh.
RankParts gather_parts(const at::Tensor& own, const DeviceMesh& mesh, const BatchGrid& grid,
                       bool of_batch);

/// One way to read parts: whole tensors that should be equal.
struct Whole {
  at::Tensor tensor;
  std::string rank;  ///< that has it; empty: it was joined from several
};
using Reading = std::vector<Whole>;

/// All ways. Ranks with the same samples have copies, or parts along some dimension; ranks with
/// different ones have copies, or parts along dimension 0, or means over their samples.
std::vector<Reading> readings(const RankParts& parts);

/// The copies of a tensor of `sizes` that `tensor` consists of, stacked: where a style computes
/// each head on several ranks, these are consecutive along the dimension of the heads, and a rank's
/// `shard` is one head. Undefined: `tensor` is nothing of the kind.
at::Tensor copies_of_heads(const at::Tensor& tensor, at::IntArrayRef shard, at::IntArrayRef sizes);

/// "[8, 4] on (tp=2) as [Shard(0)]", or "[8, 4], plain".
std::string layout_of(const at::Tensor& tensor);

}  // namespace tessera::observe
