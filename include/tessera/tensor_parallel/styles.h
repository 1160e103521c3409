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

/// Says how tensor parallelism changes one module: placements of parameters, and redistribution of
/// inputs and outputs. Immutable: many modules, meshes and threads can share one object. Derive
/// from this class for your own style (docs/modules/your_own_module.md).
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  /// The style's name for messages, such as "colwise_parallel".
  virtual std::string name() const = 0;
  /// Returns placements for parameters in and below `module`, or an empty list. A submodule's own
  /// plan entry takes precedence. Does not change `module`. Throws Error for an unsuitable module.
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
  /// Whether the style needs the hooks of apply(). A module inside an nn::Hooked runs no hooks, so
  /// only styles without hooks can be applied to such a module. apply() is then not called.
  virtual bool adds_hooks() const { return true; }
};
/// A pointer to a style, which several entries of a plan can share.
using StylePtr = std::shared_ptr<const ParallelStyle>;

/// Pairs of an FQN pattern (nn::matches_fqn) and a style: {"layers.*.mlp.up_proj",
/// colwise_parallel()}. The pattern "" matches the module that parallelize_module() gets.
using ParallelizePlan = std::vector<std::pair<std::string, StylePtr>>;

// Styles and options have PyTorch's names. docs/tensor_parallel.md describes the two defaults that
// differ from PyTorch. Several styles have these options:
// * input_layouts: the placement of forward's first argument if the argument is plain. Replicate
//   (the default): equal on every rank. Otherwise: this rank's part of a tensor with this
//   placement.
// * output_layouts: the placement of the first tensor in forward's result.
// * regather: backward gathers a split input again, so that only the shard is saved (Korthikanti et
//   al. 2022). For nn::Linear and nn::FusedLinear with a column-wise style. Set the option in the
//   style that gathers and in the styles of the Linears. Backward with create_graph throws Error.
// * use_local_output: the result is the plain local tensor: of a sharded result, the rank's shard.
//   Redistribution is collective over the mesh and differentiable.

/// Options of colwise_parallel(), for Linear and Embedding: shards the output features. The weight
/// and bias of a Linear are Shard(0), the weight of an Embedding is Shard(1). The input is
/// replicated first. To gather a split input once for several projections, use
/// prepare_module_input().
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
/// keys or values of grouped-query attention. The number of ranks must be a multiple of `heads`.
/// Parameters are replicated; their gradients are sums over the ranks. (ranks / heads) consecutive
/// ranks compute the same head, as in Megatron-LM. The result is Shard(-1): each rank has one head.
struct ReplicatedHeadsOptions {
  std::int64_t heads = 0;
  Placement input_layouts = Replicate{};
  bool regather = true;
};
/// Creates the style for key and value projections with fewer heads than ranks
/// (ReplicatedHeadsOptions).
StylePtr replicated_heads_parallel(ReplicatedHeadsOptions options);

/// Options of fused_colwise_parallel(), for an nn::FusedLinear, or an nn::Linear with several equal
/// parts (query, key and value; gate and up). Each part is sharded: chunk() of the local result
/// returns the rank's shard of each part. A distributed result is _StridedShard(-1, parts).
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

/// Options of rowwise_parallel(). For a Linear: shards the input features, weight Shard(1); the
/// bias is added after the reduction. For an Embedding: shards the vocabulary, weight Shard(0);
/// every rank looks up all indices.
struct RowwiseOptions {
  std::optional<Placement> input_layouts{};  ///< placement of a plain input; default: Shard{-1}
  Placement output_layouts = Replicate{};    ///< placement of the result after its reduction
  bool use_local_output = false;
  /// Number of heads in the input features of a Linear; see ColwiseOptions::heads.
  std::int64_t heads = 0;
};
/// Creates the row-wise style (RowwiseOptions), which is like PyTorch's RowwiseParallel.
StylePtr rowwise_parallel(RowwiseOptions options = {});

/// Options of sequence_parallel(), for norms and dropout with activations sharded along the
/// sequence (Korthikanti et al. 2022). The parameters are replicated.
struct SequenceOptions {
  std::int64_t sequence_dim = 1;
  bool use_local_output = false;
};
/// Creates the style for norms and dropout under sequence parallelism (SequenceOptions). Like
/// PyTorch's SequenceParallel.
StylePtr sequence_parallel(SequenceOptions options = {});

/// Options of replicate_parallel(): replicates parameters, input and output of a module and its
/// submodules, like torchtitan's NoParallel. A split input is gathered. For a norm over each head,
/// use no style, or sequence_parallel() with the dimension of the heads.
struct ReplicateOptions {
  bool use_local_output = false;
};
/// Creates the style that replicates parameters, inputs and outputs (ReplicateOptions).
StylePtr replicate_parallel(ReplicateOptions options = {});

/// Creates a style that places a module's own parameters, like PyTorch's distribute_module with
/// partition_fn. For class tokens, position embeddings, LayerScale, and modules inside an
/// nn::Hooked. `placements`: pairs such as {"weight", Shard{0}}; other own parameters are
/// replicated. Inputs are not converted. parallelize_module throws Error for an unknown name, and
/// for a module without own parameters.
StylePtr place_parameters(std::vector<std::pair<std::string, Placement>> placements = {});

/// Options of prepare_module_input(), for any module. Entry i is for the i-th tensor in forward's
/// arguments; nullopt: unchanged. `input_layouts`: placements of plain tensors.
/// `desired_input_layouts`: placements after redistribution.
struct PrepareModuleInputOptions {
  std::vector<std::optional<Placement>> input_layouts{};
  std::vector<std::optional<Placement>> desired_input_layouts{};
  bool use_local_output = false;
  bool regather = true;
};
/// Creates the style that redistributes the inputs of a module (PrepareModuleInputOptions). Like
/// PyTorch's PrepareModuleInput.
StylePtr prepare_module_input(PrepareModuleInputOptions options);

/// Options of prepare_module_output(), for any module. Entry i is for the i-th tensor in forward's
/// result; nullopt: unchanged. `output_layouts`: placements of plain tensors.
/// `desired_output_layouts`: placements after redistribution.
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

/// For user-defined styles: converts `tensor`, an argument or result of `module`, to placement
/// `desired` on the 1-D `mesh`. `layout`: the placement of a plain tensor, with global sizes
/// `sizes` (default: the ranks exchange the sizes). `regather`: whether backward gathers a split
/// input again.
///
/// Collective if data or sizes are sent. Differentiable. Throws Error if `tensor` is undefined or
/// on another mesh. Throws Error on all ranks if the plain tensors are not shards of one tensor.
at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes = {},
                         bool regather = false);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
