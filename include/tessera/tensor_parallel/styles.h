#pragma once

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

/// What tensor parallelism does to one module: how its parameters are placed on the mesh, and how
/// its inputs and outputs are redistributed. An object is immutable and may serve many modules,
/// meshes and threads.
///
/// A style of your own derives from this class. This one shards the features of a norm (compiled
/// and run by ParallelStyleExample in tests/tensor_parallel/style_example_test.cpp):
///
///   class ShardedScale final : public tensor_parallel::ParallelStyle {
///    public:
///     std::string name() const override { return "sharded_scale"; }
///     std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
///         const nn::ModuleBase& module) const override {
///       return {{module.slot("weight"), Shard{0}}};
///     }
///     void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
///       module.add_forward_pre_hook([mesh](nn::ModuleBase&, nn::TensorList inputs) {
///         *inputs[0] = distribute_tensor(*inputs[0], mesh, {Shard{-1}}).tensor();
///       });
///     }
///   };
///   tensor_parallel::parallelize_module(model, mesh["tp"],
///                                       {{"scale", std::make_shared<ShardedScale>()}});
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  /// For messages: "colwise_parallel".
  virtual std::string name() const = 0;
  /// The placements of parameters of `module` or of modules below it; empty for a style that leaves
  /// them alone. If another entry of the plan names a module below, its placements win there.
  /// Changes nothing. Throws Error for a module that the style does not fit.
  virtual std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const = 0;
  /// Throws Error where `module` cannot be split over `mesh`. Changes nothing; called after
  /// parameters().
  virtual void check(const nn::ModuleBase& module, const DeviceMesh& mesh) const {
    (void)module;
    (void)mesh;
  }
  /// Adds the hooks to `module`, whose parameters are now placed as parameters() said.
  virtual void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const = 0;
  /// Whether the style needs the hooks that apply() adds. A part of a module in nn::Hooked runs
  /// none: it takes a style without need of them, whose parameters() are placed, and apply() is not
  /// called. The operators on what is placed then take tensors where they have to be.
  virtual bool adds_hooks() const { return true; }
};
/// Shared by the entries of a plan that name it.
using StylePtr = std::shared_ptr<const ParallelStyle>;

/// Pattern of a module's FQN (see nn::matches_fqn) and its style: {"layers.*.mlp.up_proj",
/// colwise_parallel()}. "" is the module itself that the plan is applied to.
using ParallelizePlan = std::vector<std::pair<std::string, StylePtr>>;

// The styles of PyTorch, with the names of their options there; the defaults differ in
// use_local_output, and in what a plain input is (docs/tensor_parallel.md). In all of them:
// * input_layouts: what a plain tensor, the first one of forward's arguments, is taken for. By
// default
//   it is the same on every rank; another placement says that it is this rank's part. A distributed
//   tensor has its own.
// * output_layouts: the placement of the first tensor of the result.
// * regather: where a split input is gathered, nn::Linear and nn::FusedLinear with a column-wise
//   style keep its shard for backward, and gather it again there, once for all that share it:
//   Korthikanti et al. 2022. Such a backward cannot be differentiated itself. The styles of the
//   gather and of the products must both have it; without it the gathered input is kept.
// * use_local_output: hand out the local tensor, plain, in place of the distributed one. For a
//   split result that is this rank's part: what it means from then on is the caller's word
//   (docs/tensor_parallel.md).
// Redistributing is collective over the mesh and differentiable.

/// For Linear and Embedding. Shards the output features: of a Linear weight (and bias) Shard(0), of
/// an Embedding weight Shard(1). The input is replicated first.
struct ColwiseOptions {
  Placement input_layouts = Replicate{};
  Placement output_layouts = Shard{-1};
  bool use_local_output = false;
  /// How many heads the output features are, each rank's whole: Error at plan time if the ranks
  /// don't divide them. 0: features that may be cut anywhere.
  std::int64_t heads = 0;
  bool regather = true;
};
/// PyTorch's ColwiseParallel.
StylePtr colwise_parallel(ColwiseOptions options = {});

/// For an nn::Linear whose output features are `heads` heads, fewer than there are ranks: the keys
/// or values of grouped-query attention, where colwise_parallel() would cut heads. The ranks must
/// be a multiple of the heads. The parameters are replicated, and each head is computed on ranks /
/// heads consecutive ranks: those with the queries that it serves, if these are split by
/// colwise_parallel(). The result is as if each rank had its own copy of its head: Shard(-1) of
/// ranks * (features / heads) features; the parameters' gradients are sums over the ranks.
/// Megatron-LM's tensor parallelism beyond the number of query groups.
struct ReplicatedHeadsOptions {
  std::int64_t heads = 0;
  Placement input_layouts = Replicate{};
  bool use_local_output = false;
  bool regather = true;  ///< its own gather: the product always follows the input's gather
};
/// See ReplicatedHeadsOptions.
StylePtr replicated_heads_parallel(ReplicatedHeadsOptions options);

/// For an nn::FusedLinear, or an nn::Linear whose output features are equal parts (query, key and
/// value; gate and up): shards each part, so that a rank's result is its share of the first part,
/// then of the second, and may be split or chunked into as many. colwise_parallel() would give a
/// rank consecutive features of one part or two. A distributed result has _StridedShard(-1, parts).
struct FusedColwiseOptions {
  std::int64_t parts = 0;  ///< for an nn::Linear; an nn::FusedLinear knows its own
  Placement input_layouts = Replicate{};
  bool use_local_output = false;
  bool regather = true;
};
/// See FusedColwiseOptions. MLX's shard_linear(..., segments).
StylePtr fused_colwise_parallel(FusedColwiseOptions options = {});

/// For Linear and Embedding. Shards the input features of a Linear: weight Shard(1); the bias is
/// replicated and added after the reduction. Shards the vocabulary of an Embedding: weight
/// Shard(0); every rank looks up all indices.
struct RowwiseOptions {
  std::optional<Placement> input_layouts{};  ///< Shard{-1}: a plain input is this rank's features
  Placement output_layouts = Replicate{};    ///< Replicate: all-reduce; Shard: reduce-scatter
  bool use_local_output = false;
  std::int64_t heads = 0;  ///< of a Linear's input features, as ColwiseOptions::heads
};
/// PyTorch's RowwiseParallel.
StylePtr rowwise_parallel(RowwiseOptions options = {});

/// For norms and dropout on activations that are sharded along the sequence: each rank computes its
/// tokens, with replicated parameters. Korthikanti et al. 2022.
struct SequenceOptions {
  std::int64_t sequence_dim = 1;
  bool use_local_output = false;
};
/// PyTorch's SequenceParallel.
StylePtr sequence_parallel(SequenceOptions options = {});

/// The same without sequence parallelism: parameters, input and output are replicated, so that a
/// norm takes and returns distributed tensors, with those of modules below that no entry names.
/// torchtitan's NoParallel. A split input is gathered:
/// a norm of heads takes sequence_parallel with the dimension that is split, or no style.
struct ReplicateOptions {
  bool use_local_output = false;
};
/// See ReplicateOptions.
StylePtr replicate_parallel(ReplicateOptions options = {});

/// For the parameters that a module holds itself, those of modules below excepted: a container's
/// class token, registers, positions or LayerScale, or a part of a module in nn::Hooked. By name,
/// as PlaceOptions says; all others are replicated, as without an entry. Inputs are not converted;
/// the parameters' gradients equal those of one rank.
struct PlaceOptions {
  std::vector<std::pair<std::string, Placement>> placements{};  ///< {{"weight", Shard{0}}}
};
/// See PlaceOptions. Throws Error at plan time for a name that the module does not have, and for a
/// module that holds no parameters itself. PyTorch's distribute_module with a partition_fn.
StylePtr place_parameters(PlaceOptions options = {});

/// For any module. One entry for each tensor of forward's arguments, in order (nullopt: leave it
/// alone): its placement, and the one to redistribute it to.
struct PrepareModuleInputOptions {
  std::vector<std::optional<Placement>> input_layouts{};
  std::vector<std::optional<Placement>> desired_input_layouts{};
  bool use_local_output = false;
  bool regather = true;
};
/// PyTorch's PrepareModuleInput.
StylePtr prepare_module_input(PrepareModuleInputOptions options);

/// The same for the tensors of the result.
struct PrepareModuleOutputOptions {
  std::vector<std::optional<Placement>> output_layouts{};
  std::vector<std::optional<Placement>> desired_output_layouts{};
  bool use_local_output = false;
};
/// PyTorch's PrepareModuleOutput.
StylePtr prepare_module_output(PrepareModuleOutputOptions options);

/// Both: the tensors of forward's arguments, and those of the result.
struct PrepareModuleInputOutputOptions {
  std::vector<std::optional<Placement>> input_layouts{};
  std::vector<std::optional<Placement>> desired_input_layouts{};
  bool use_local_input = false;
  std::vector<std::optional<Placement>> output_layouts{};
  std::vector<std::optional<Placement>> desired_output_layouts{};
  bool use_local_output = false;
};
/// PyTorch's PrepareModuleInputOutput.
StylePtr prepare_module_input_output(PrepareModuleInputOutputOptions options);

}  // namespace tessera::tensor_parallel
TESSERA_API_END
