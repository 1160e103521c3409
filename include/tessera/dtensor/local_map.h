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
  /// to_local). Pass Partial for a replicated argument if each rank computes one term of the
  /// gradient. Pass Replicate if the function reduces the gradient. The default (nullopt or an
  /// empty list) is the argument's placements, with Replicate in place of Partial. Where the
  /// argument is replicated and a result is not, the default is Partial.
  std::vector<std::optional<Placements>> in_grad_placements{};
  /// The global sizes of each result. If the list is empty, the ranks exchange the sizes of sharded
  /// results, as DistributedTensor::from_local does.
  std::vector<std::vector<std::int64_t>> out_sizes{};
};

/// Calls `function` with the local tensors of `arguments`, and wraps the results as distributed
/// tensors with `out_placements` (one list per result). Plain arguments must be equal on every
/// rank, and count as Replicate in the options. Like PyTorch's local_map.
///
/// Collective if `function` is collective. Autograd records the operators of `function`. Autograd
/// does not record collectives that `function` calls directly, so `function` must define the
/// gradients of these collectives. The gradient of a plain argument is already reduced. Throws
/// Error for wrong placements, or lists of the wrong length.
///
///   // x is sharded. Each rank sums the squares of its shard: one term of the result.
///   const auto sum_of_squares = [](const std::vector<at::Tensor>& locals) {
///     return std::vector{locals[0].square().sum()};
///   };
///   at::Tensor loss = local_map(sum_of_squares, {x}, mesh, {{Partial{}}}).front();
///   loss.backward();
std::vector<at::Tensor> local_map(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& arguments, const DeviceMesh& mesh,
    const std::vector<Placements>& out_placements, const LocalMapOptions& options = {});

}  // namespace tessera
TESSERA_API_END
