// Lowerings are alternative implementations of operators, used in place of sharding rules.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "operators/operator_info.h"
#include "tensor/distributed_impl.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

using Arguments = std::span<const c10::IValue>;
using Results = std::vector<c10::IValue>;

/// An alternative implementation of an operator, for calls whose sharding rule would gather an
/// input. Each rank computes on its shard, and the ranks exchange only as much data as the result
/// has.
struct Lowering {
  /// Name of the operator, without the prefix "aten::" of libtorch's operators.
  std::string_view name;
  /// Returns the bytes that one rank sends, or nullopt if the lowering does not support the call.
  /// Depends only on data in the call's cache key.
  std::optional<double> (*bytes)(const BoundCall& call);
  /// Computes the operator's results, below autograd. Collective unless bytes() is 0.
  Results (*run)(Arguments arguments);
  /// Whether the operator itself communicates, as in a loss with a sharded vocabulary. If true, the
  /// lowering is always used if supported, and a StrictScope permits the communication.
  bool own_collectives = false;
};

/// Returns the lowering (alternative implementation) of an operator, or nullptr. The lowering
/// exists until the process ends, because cached plans refer to the lowering.
const Lowering* lowering_of(const OperatorInfo& info);

/// A static AddedLowerings object adds lowerings (alternative implementations of operators) to the
/// table of lowerings. An operator has at most one lowering.
struct AddedLowerings {
  AddedLowerings(std::initializer_list<Lowering> added);
};
using Lowerings = std::unordered_map<std::string_view, Lowering>;
const Lowerings& all_lowerings();

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

using Dims = std::vector<std::int64_t>;

/// Returns the DistributedTensorImpl of the argument with index `arg`; nullptr if the argument is
/// None, plain, or Partial, because no lowering supports Partial.
const DistributedTensorImpl* non_partial_argument(const BoundCall& call, std::size_t arg);

/// Returns the mesh dimensions that shard the tensor dimensions `dims`, in the order of `dims`.
/// Mesh dimensions of one tensor dimension are in splitting order.
std::vector<int> sharding_mesh_dims(LayoutPtr layout, const Dims& dims);
/// Returns the maximum number of elements that a rank has in a reduction's result over `dims`.
std::int64_t most_local_results(const TensorSpec& spec, const Dims& dims);
/// Returns the bytes that one rank sends to all-reduce `elements` over the ranks that shard `dims`.
double all_reduce_bytes(const TensorSpec& spec, const Dims& dims, double elements);

}  // namespace tessera::detail
