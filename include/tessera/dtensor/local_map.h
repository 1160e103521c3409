#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera {

struct LocalMapOptions {
  /// What each tensor argument must lie as (nullopt: as it comes). Empty: all as they come.
  std::vector<std::optional<Placements>> in_placements{};
  /// What the function's gradient for each tensor argument lies as (see to_local); nullopt or
  /// empty: as the argument does, replicated where that is partial. Partial where each rank's call
  /// makes its own term of a replicated argument's gradient.
  std::vector<std::optional<Placements>> in_grad_placements{};
  /// Bring arguments that lie otherwise to in_placements; else they are an Error.
  bool redistribute_inputs = false;
  /// Global sizes of each result; empty: from the local ones, shards being even.
  std::vector<std::vector<std::int64_t>> out_sizes{};
};

/// Runs `function` on the local tensors of `arguments` (plain ones are passed as they are) and
/// takes its results for parts of distributed tensors that lie as `out_placements` say. The way to
/// write an operator by hand, collectives included. Differentiable. PyTorch's local_map.
std::vector<at::Tensor> local_map(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& arguments, const DeviceMesh& mesh,
    const std::vector<Placements>& out_placements, const LocalMapOptions& options = {});

}  // namespace tessera
