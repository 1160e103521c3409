#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::tensor_parallel {

/// A ParallelStyle says how tensor parallelism changes one module: the placements of the module's
/// parameters, and the redistribution of its inputs and outputs. A style object is immutable; many
/// modules, meshes and threads can share one object.
///
/// Derive from this class for a user-defined style (docs/modules/your_own_module.md).
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  /// The style's name for messages, such as "colwise_parallel".
  virtual std::string name() const = 0;
  /// Returns placements for parameters of `module` and its submodules; an empty list if the style
  /// places no parameters. If a submodule's own plan entry also places a parameter, the submodule's
  /// entry takes precedence. Does not change the module. Throws Error for a module to which the
  /// style cannot be applied.
  virtual std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const = 0;
  /// Throws Error if `module` cannot be sharded over `mesh`. Does not change the module. Called
  /// after parameters().
  virtual void check(const nn::ModuleBase& module, const DeviceMesh& mesh) const {
    (void)module;
    (void)mesh;
  }
  /// Adds the hooks to `module`, after its parameters were distributed with the placements from
  /// parameters().
  virtual void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const = 0;
  /// Whether the style needs the hooks of apply(). Only styles without hooks can be applied to a
  /// module inside an nn::Hooked, because such a module runs no hooks. For this module apply() is
  /// not called; the module's operators redistribute their arguments instead.
  virtual bool adds_hooks() const { return true; }
};
/// A pointer to a style, which several entries of a plan can share.
using StylePtr = std::shared_ptr<const ParallelStyle>;

/// Pairs of an FQN pattern (nn::matches_fqn) and a style: {"layers.*.mlp.up_proj",
/// colwise_parallel()}. The pattern "" matches the module that parallelize_module() gets.
using ParallelizePlan = std::vector<std::pair<std::string, StylePtr>>;

// Styles and options have PyTorch's names. Two defaults differ: use_local_output, and the meaning
// of a plain input (docs/tensor_parallel.md). Options that several styles have:
// * input_layouts: the placement of forward's first argument if it is plain. Replicate (the
//   default): the argument is the same on every rank. Another placement: the argument is this
//   rank's part of a tensor with this placement. A distributed argument has its own placement.
// * output_layouts: the placement of the first tensor in forward's result.
// * regather: only the shard of a split input is saved, and backward gathers the input again, once
//   for all matrix products of this input (Korthikanti et al. 2022). For nn::Linear and
//   nn::FusedLinear with a column-wise style. The option must be set in the style that gathers and
//   in the styles of the Linears; otherwise the gathered input is saved for backward. With
//   activation checkpointing, the recomputation gathers the input, and backward uses this copy.
//   Backward with create_graph throws Error.
// * use_local_output: the result is the plain local tensor instead of the distributed tensor. For a
//   sharded result this is the rank's shard (docs/tensor_parallel.md, "Local parts").
//   Redistribution is collective over the mesh and differentiable.

/// Options of colwise_parallel(), for Linear and Embedding. The style shards the output features:
/// the weight and bias of a Linear are Shard(0), the weight of an Embedding is Shard(1). The input
/// is replicated first. Each module with this style gathers a split input separately. If several
/// projections have the same input, give their parent module prepare_module_input(), which gathers
/// the input once.
struct ColwiseOptions {
  Placement input_layouts = Replicate{};
  Placement output_layouts = Shard{-1};
  bool use_local_output = false;
  /// The number of heads in the output features; 0: the features may be split anywhere. Ranks get
  /// whole heads: parallelize_module throws Error unless the number of ranks divides `heads`.
  std::int64_t heads = 0;
  bool regather = true;
};
/// Creates the column-wise style for Linear and Embedding (ColwiseOptions). Like PyTorch's
/// ColwiseParallel.
StylePtr colwise_parallel(ColwiseOptions options = {});

/// Options of replicated_heads_parallel(), for an nn::Linear with fewer heads than ranks, such as
/// the keys or values of grouped-query attention, where colwise_parallel() would split single
/// heads. The number of ranks must be a multiple of `heads`. The parameters are replicated. Each
/// head is computed on (number of ranks) / `heads` consecutive ranks. If colwise_parallel() splits
/// the queries, these ranks also have the head's queries. The result is Shard(-1): a tensor of
/// (number of ranks) * (features / heads) features, in which each rank has one head. The gradients
/// of the parameters are sums over the ranks. Like Megatron-LM with fewer query groups than ranks.
struct ReplicatedHeadsOptions {
  std::int64_t heads = 0;
  Placement input_layouts = Replicate{};
  bool regather = true;
};
/// Creates the style for key and value projections with fewer heads than ranks
/// (ReplicatedHeadsOptions).
StylePtr replicated_heads_parallel(ReplicatedHeadsOptions options);

/// Options of fused_colwise_parallel(), for an nn::FusedLinear, or an nn::Linear whose output
/// features consist of several equal parts (query, key and value; gate and up). The style shards
/// each part: the result of a rank is the rank's shard of the first part, followed by the rank's
/// shard of the second part, and so on. chunk() of the local result therefore returns the rank's
/// shard of each part. colwise_parallel() would give a rank consecutive features of only one or two
/// parts. A distributed result is _StridedShard(-1, parts).
struct FusedColwiseOptions {
  /// Number of equal parts of an nn::Linear's output features; must be 0 for an nn::FusedLinear.
  std::int64_t parts = 0;
  Placement input_layouts = Replicate{};
  bool use_local_output = false;
  bool regather = true;
};
/// Creates the column-wise style for fused projections (FusedColwiseOptions). Like MLX's
/// shard_linear(..., segments).
StylePtr fused_colwise_parallel(FusedColwiseOptions options = {});

/// Options of rowwise_parallel(), for Linear and Embedding. For a Linear, the style shards the
/// input features: the weight is Shard(1), and the bias is replicated and added after the
/// reduction. For an Embedding, the style shards the vocabulary: the weight is Shard(0), and every
/// rank looks up all indices.
struct RowwiseOptions {
  std::optional<Placement> input_layouts{};  ///< placement of a plain input; default: Shard{-1}
  Placement output_layouts = Replicate{};    ///< placement of the result after its reduction
  bool use_local_output = false;
  /// Number of heads in the input features of a Linear; see ColwiseOptions::heads.
  std::int64_t heads = 0;
};
/// Creates the row-wise style (RowwiseOptions), which is like PyTorch's RowwiseParallel.
StylePtr rowwise_parallel(RowwiseOptions options = {});

/// Options of sequence_parallel(), for norms and dropout if activations are sharded along the
/// sequence. Each rank computes its own shard of the tokens. The parameters are replicated. See
/// Korthikanti et al. 2022.
struct SequenceOptions {
  std::int64_t sequence_dim = 1;
  bool use_local_output = false;
};
/// Creates the style for norms and dropout under sequence parallelism (SequenceOptions). Like
/// PyTorch's SequenceParallel.
StylePtr sequence_parallel(SequenceOptions options = {});

/// Options of replicate_parallel(), which replicates parameters, input and output of a module,
/// without sequence parallelism. Parameters of submodules are included, unless another entry of the
/// plan names these modules. Like torchtitan's NoParallel. A split input is gathered. Do not use
/// this style for a norm over the features of each head, which would gather the heads: give the
/// norm no style, or sequence_parallel() with the dimension of the heads.
struct ReplicateOptions {
  bool use_local_output = false;
};
/// Creates the style that replicates parameters, inputs and outputs (ReplicateOptions).
StylePtr replicate_parallel(ReplicateOptions options = {});

/// Creates the style that places a module's own parameters as the caller requests. Parameters of
/// submodules are not changed. Use this style for parameters of a module that is not a layer, such
/// as a class token, register tokens, position embeddings or a LayerScale, and for a module inside
/// an nn::Hooked. `placements`: pairs of parameter name and placement, such as {"weight",
/// Shard{0}}. Parameters that `placements` does not name are replicated. The style does not convert
/// the module's inputs. The gradients equal those of a run on one rank. parallelize_module throws
/// Error for a name that the module does not have, and for a module without own parameters. Like
/// PyTorch's distribute_module with partition_fn.
StylePtr place_parameters(std::vector<std::pair<std::string, Placement>> placements = {});

/// Options of prepare_module_input(), for any module. Entry i of each list is for the i-th tensor
/// among the arguments of forward: `input_layouts` is the placement of a plain tensor,
/// `desired_input_layouts` the placement after redistribution. With nullopt the tensor is not
/// changed.
struct PrepareModuleInputOptions {
  std::vector<std::optional<Placement>> input_layouts{};
  std::vector<std::optional<Placement>> desired_input_layouts{};
  bool use_local_output = false;
  bool regather = true;
};
/// Creates the style that redistributes the inputs of a module (PrepareModuleInputOptions). Like
/// PyTorch's PrepareModuleInput.
StylePtr prepare_module_input(PrepareModuleInputOptions options);

/// Options of prepare_module_output(), for any module. Entry i of each list is for the i-th tensor
/// in the result of forward: `output_layouts` is the placement of a plain tensor,
/// `desired_output_layouts` the placement after redistribution. With nullopt the tensor is not
/// changed.
struct PrepareModuleOutputOptions {
  std::vector<std::optional<Placement>> output_layouts{};
  std::vector<std::optional<Placement>> desired_output_layouts{};
  bool use_local_output = false;
};
/// Creates the style that redistributes the outputs of a module (PrepareModuleOutputOptions). Like
/// PyTorch's PrepareModuleOutput.
StylePtr prepare_module_output(PrepareModuleOutputOptions options);

/// Options of prepare_module_input_output(). Each field means the same as the field of this name in
/// PrepareModuleInputOptions or PrepareModuleOutputOptions.
struct PrepareModuleInputOutputOptions {
  std::vector<std::optional<Placement>> input_layouts{};
  std::vector<std::optional<Placement>> desired_input_layouts{};
  bool use_local_input = false;
  std::vector<std::optional<Placement>> output_layouts{};
  std::vector<std::optional<Placement>> desired_output_layouts{};
  bool use_local_output = false;
};
/// Creates the style that redistributes the inputs and outputs of a module
/// (PrepareModuleInputOutputOptions). Like PyTorch's PrepareModuleInputOutput.
StylePtr prepare_module_input_output(PrepareModuleInputOutputOptions options);

/// A function for user-defined parallel styles. Converts `tensor`, an argument or result of
/// `module`, to a distributed tensor with placement `desired` on the 1-D `mesh`. `layout`: the
/// placement of a plain tensor. With Replicate the plain tensor is the same on every rank;
/// otherwise the plain tensor is this rank's shard of a tensor with global sizes `sizes` (default:
/// the ranks exchange the sizes of their shards). `regather`: whether backward gathers a split
/// input again, so that the gathered input is not saved. Collective if data or sizes are sent.
/// Differentiable. Throws Error if `tensor` is undefined or on another mesh, and on all ranks if
/// the plain tensors are not shards of one tensor.
at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes = {},
                         bool regather = false);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
