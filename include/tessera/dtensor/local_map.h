#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// How local_map takes its arguments and their gradients.
struct LocalMapOptions {
  /// The placements that each tensor argument must have; nullopt: any. Empty: any for all.
  std::vector<std::optional<Placements>> in_placements{};
  /// The placements of the gradient that the function makes for each tensor argument (see
  /// to_local). nullopt or empty: those of the argument, Replicate for Partial; but on a mesh
  /// dimension where the argument is replicated and the results are sharded or sums, Partial: each
  /// rank makes its own term. Required for a replicated argument where the results of the ranks
  /// differ. A function that communicates may reduce gradients itself: then say Replicate.
  std::vector<std::optional<Placements>> in_grad_placements{};
  /// Redistribute arguments that have other placements than in_placements; otherwise they are an
  /// Error.
  bool redistribute_inputs = false;
  /// The global sizes of each result. Empty: those of a sharded one are agreed on, as from_local's.
  std::vector<std::vector<std::int64_t>> out_sizes{};
};

/// Calls `function` with the local tensors of `arguments` (plain ones, the same on every rank,
/// unchanged) and wraps its results as the local tensors of distributed ones with `out_placements`,
/// one list per result. For operations written on shards. Collective if `function` is or if inputs
/// are redistributed. Differentiable: autograd records the operators that `function` runs;
/// collectives that it calls itself need their own gradient. Throws Error for arguments with wrong
/// placements, for lists of options that are neither empty nor of one item each, and for a wrong
/// number of results. The gradient of a plain argument is plain and
/// whole, by the same rules as that of a replicated one. PyTorch's local_map.
///
///   // x is sharded. Each rank sums the squares of its shard: one term of the result.
///   const auto sum_of_squares = [](const std::vector<at::Tensor>& locals) {
///     return std::vector{locals[0].square().sum()};
///   };
///   at::Tensor loss = local_map(sum_of_squares, {x}, mesh, {{Partial{}}}).front();
///   loss.backward();
///
/// tests/dtensor/dispatch/semantics_test.cpp runs this example.
std::vector<at::Tensor> local_map(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& arguments, const DeviceMesh& mesh,
    const std::vector<Placements>& out_placements, const LocalMapOptions& options = {});

}  // namespace tessera
TESSERA_API_END
