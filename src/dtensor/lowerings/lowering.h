// Lowerings: other ways to run an operator than its rule.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "operators/bound_call.h"
#include "operators/operator_info.h"
#include "tensor/distributed_impl.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

using Arguments = std::span<const c10::IValue>;
using Results = std::vector<c10::IValue>;

/// Another way to run an operator than its rule, for calls that would gather an input: each rank
/// works on its shard, and only data of the result's size are exchanged. A composition of operators
/// on distributed tensors, or local work that depends on which elements a rank holds.
struct Lowering {
  std::string_view name;  ///< of the operator; one of libtorch's without "aten::"
  /// Bytes that one rank sends in this lowering; nullopt: it does not cover the call. A pure
  /// function of what is in the call's key.
  std::optional<double> (*bytes)(const BoundCall& call);
  /// Arguments to results, as the operator. Below autograd. Collective if bytes() isn't 0.
  Results (*run)(Arguments arguments);
  /// The exchange is the operator's purpose: its caller requested it, also in a strict scope.
  /// Such a lowering is taken wherever it covers the call, whatever it sends.
  bool own_collectives = false;
};

/// The lowering that sends the least for a call that would otherwise send `bytes` a rank, if its
/// operator has one that sends fewer.
struct LoweringChoice {
  const Lowering* lowering = nullptr;
  bool moves = false;  ///< it exchanges what the caller has not asked for
};
LoweringChoice choose_lowering(const OperatorInfo& info, const BoundCall& bound, double bytes);

/// All lowerings of an operator.
std::span<const Lowering* const> lowerings_of(const OperatorInfo& info);

/// Registers lowerings: a static object of the file that defines them, made while libraries are
/// loaded. The lowerings of one operator are in one such object, or their order is that of the
/// link.
struct AddedLowerings {
  AddedLowerings(std::initializer_list<Lowering> lowerings);
};
/// All lowerings, a table for each AddedLowerings.
std::vector<std::span<const Lowering>> lowering_tables();

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

// Shared by the lowerings: how much of a tensor ranks hold, and the layout of its reduction.

using Dims = std::vector<std::int64_t>;

/// The distributed tensor that argument `arg` is; nullptr if it is None, plain, or partial, which
/// no form takes.
const DistributedTensorImpl* non_partial_argument(const BoundCall& call, std::size_t arg);
/// The impl of a tensor that must be distributed.
const DistributedTensorImpl& impl_of(const at::Tensor& tensor);

/// The dimensions that argument `arg` names, from 0, ascending; all if it is None or empty.
Dims named_dims(const OpCall& call, std::size_t arg, std::int64_t ndim);
/// The dimensions in the argument itself, an int or a list.
Dims named_dims(const c10::IValue& argument, std::int64_t ndim);
Dims all_dims(std::int64_t ndim);

/// The mesh dimensions that shard one of `dims`, in the order of the dimensions and their digits.
std::vector<int> sharding_mesh_dims(LayoutPtr layout, const Dims& dims);
/// The number of ranks in a group over `mesh_dims`.
std::int64_t group_size(LayoutPtr layout, const std::vector<int>& mesh_dims);

/// The number of elements along `dims`, globally: those that one result of a reduction is made of.
std::int64_t numel_along(const TensorSpec& spec, const Dims& dims);
/// The number of results of a reduction over `dims` on the rank with the largest shard.
std::int64_t most_local_results(const TensorSpec& spec, const Dims& dims);
/// The bytes that one rank sends in an all-reduce of `elements` elements over the ranks that shard
/// `dims`.
double all_reduce_bytes(const TensorSpec& spec, const Dims& dims, double elements);

struct Reduction {
  const TensorSpec& spec;
  Dims dims;
};
/// The reduction of argument 0 over the dimensions that argument `dims` names; below 0: over all.
/// nullopt: no form takes it. Without any elements libtorch throws its own error, once the call is
/// gathered.
std::optional<Reduction> reduction_of(const BoundCall& call, int dims);

/// The sizes and layout of the result of a reduction over `dims`. With `partial` it is partial over
/// the mesh dimensions that shard them.
struct ReducedSpec {
  std::vector<std::int64_t> sizes;
  LayoutPtr layout = nullptr;
};
ReducedSpec reduced_spec(const TensorSpec& spec, const Dims& dims, bool keepdim,
                         std::optional<ReduceOp> partial = {});

/// `tensor` with its partials reduced. Collective if there are any. Below autograd.
at::Tensor reduce_partial(const at::Tensor& tensor);
/// The same for several tensors of one shape and layout, with one collective.
std::vector<at::Tensor> reduce_partials_together(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
