// Lowerings: alternative implementations of an operator, used instead of its sharding rule.
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
/// input. Each rank works on its shard, and only data of the result's size are exchanged. A
/// lowering is composed of operators on distributed tensors, or of local work that depends on which
/// elements the rank has.
struct Lowering {
  /// Name of the operator; the prefix "aten::" of libtorch's operators is omitted.
  std::string_view name;
  /// Returns the bytes that one rank sends with this lowering; nullopt if the lowering does not
  /// support the call. Depends only on data that is in the call's cache key.
  std::optional<double> (*bytes)(const BoundCall& call);
  /// Computes the operator's results, below autograd. Collective if bytes() isn't 0.
  Results (*run)(Arguments arguments);
  /// Whether communication is the purpose of the operator, as in a sharded loss. The caller has
  /// then requested the communication, even in a StrictScope. Such a lowering is used for every
  /// call that it supports, however many bytes it sends.
  bool own_collectives = false;
};

/// The lowering (alternative implementation) of an operator, or nullptr. Valid until the process
/// ends, because cached plans refer to it.
const Lowering* lowering_of(const OperatorInfo& info);

/// An AddedLowerings registers lowerings (alternative implementations), as a static object in the
/// defining file. An operator has at most one lowering.
struct AddedLowerings {
  AddedLowerings(std::initializer_list<Lowering> added);
};
/// All lowerings by operator, as Lowering::name names it.
using Lowerings = std::unordered_map<std::string_view, Lowering>;
const Lowerings& all_lowerings();

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

// Helpers of the lowerings: local sizes, and the layout of a reduction's result.

using Dims = std::vector<std::int64_t>;

/// The DistributedTensorImpl of argument `arg`. nullptr if the argument is None, plain, or Partial,
/// which no lowering supports.
const DistributedTensorImpl* non_partial_argument(const BoundCall& call, std::size_t arg);
const DistributedTensorImpl& impl_of(const at::Tensor& tensor);

/// The dimensions that argument number `arg` lists, in ascending order. All dimensions if the
/// argument is None or empty.
Dims named_dims(const OpCall& call, std::size_t arg, std::int64_t ndim);
/// The dimensions that an argument's value lists; the value is an int or a list.
Dims named_dims(const c10::IValue& argument, std::int64_t ndim);
Dims all_dims(std::int64_t ndim);

/// The mesh dimensions that shard the tensor dimensions `dims`, in the order of `dims`. For one
/// tensor dimension, they are in the order in which they shard it.
std::vector<int> sharding_mesh_dims(LayoutPtr layout, const Dims& dims);
/// The number of ranks in a group over `mesh_dims`.
std::int64_t group_size(LayoutPtr layout, const std::vector<int>& mesh_dims);

/// The number of results of a reduction over `dims` on the rank with the most results.
std::int64_t most_local_results(const TensorSpec& spec, const Dims& dims);
/// The bytes that one rank sends to all-reduce `elements` over the ranks that shard `dims`.
double all_reduce_bytes(const TensorSpec& spec, const Dims& dims, double elements);

struct Reduction {
  const TensorSpec& spec;
  Dims dims;
};
/// The reduction of argument 0 over the dimensions that argument number `dims` lists, or over all
/// dimensions if `dims` is negative. nullopt if no lowering supports the reduction. A tensor
/// without elements is not supported: it is gathered, so that libtorch throws its own error.
std::optional<Reduction> reduction_of(const BoundCall& call, int dims);

/// The sizes and layout of the result of a reduction over `dims`. With `partial`, the layout is
/// Partial over the mesh dimensions that shard `dims`.
struct ReducedSpec {
  std::vector<std::int64_t> sizes;
  LayoutPtr layout = nullptr;
};
ReducedSpec reduced_spec(const TensorSpec& spec, const Dims& dims, bool keepdim,
                         std::optional<ReduceOp> partial = {});

/// Returns `tensor` with Replicate in place of Partial. Collective if `tensor` is Partial. Runs
/// below autograd.
at::Tensor reduce_partial(const at::Tensor& tensor);
/// Like reduce_partial(), for several tensors of one shape and layout, with a single collective.
std::vector<at::Tensor> reduce_partials_together(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
