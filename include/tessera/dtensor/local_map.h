#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Options of local_map for the function's arguments and for the gradients of these arguments.
struct LocalMapOptions {
  /// Required placements of each tensor argument; nullopt permits any placements. An empty list
  /// permits any placements for all arguments.
  std::vector<std::optional<Placements>> in_placements{};
  /// The placements of the gradient that the function computes for each tensor argument (see
  /// to_local). nullopt or an empty list: the default, which is the argument's own placements with
  /// Replicate in place of Partial. But the default is Partial on a mesh dimension where the
  /// argument is replicated and a result is sharded or Partial: each rank computes one term of the
  /// gradient. For a replicated argument, pass Partial if the ranks' results differ, and Replicate
  /// if the function reduces the gradients itself.
  std::vector<std::optional<Placements>> in_grad_placements{};
  /// The global sizes of each result. If the list is empty, the ranks exchange the sizes of sharded
  /// results, as DistributedTensor::from_local does.
  std::vector<std::vector<std::int64_t>> out_sizes{};
};

/// Calls `function` with the local tensors of `arguments`, and wraps its results as the local
/// tensors of distributed tensors with `out_placements`, one list per result. Plain arguments must
/// be the same on every rank and are passed unchanged. Use local_map for operations that are
/// written for the shards of a tensor. Collective if `function` is collective. Differentiable:
/// autograd records the operators that `function` runs; collectives that `function` calls directly
/// are not recorded, so `function` must define their gradients. Throws Error for arguments with
/// wrong placements, for a wrong number of results, and for a non-empty list in the options that
/// does not have one item for each argument (`out_sizes`: for each result). The gradient of a plain
/// argument is a plain tensor, already reduced over the ranks; in the options, a plain argument
/// counts as Replicate. Like PyTorch's local_map.
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
