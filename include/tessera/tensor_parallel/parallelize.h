#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::tensor_parallel {

/// What to do to one module: how its parameters lie, and what its inputs and outputs become.
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  virtual std::string name() const = 0;
  /// How parameters of `module` (or below it) are to lie on the mesh; empty for a style that leaves
  /// them alone. Throws Error for a module that the style does not fit. Changes nothing.
  virtual std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const = 0;
  /// Adds the hooks to `module`, whose parameters lie as parameters() asked for.
  virtual void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const = 0;
};
using StylePtr = std::shared_ptr<const ParallelStyle>;

/// Pattern of a module's FQN -> style. Per component, as fnmatch: "layers.*.mlp.up_proj";
/// "" is the module itself.
using Plan = std::vector<std::pair<std::string, StylePtr>>;

/// Linear and Embedding. Linear: weight (and bias) Shard(0). Embedding: weight Shard(1).
struct ColwiseOptions {
  Placement input = Replicate{};
  Placement output = Shard{-1};
  bool use_local_output = true;
};
StylePtr colwise_parallel(ColwiseOptions options = {});

/// Linear: weight Shard(1), bias replicated and added after the reduction; input default Shard(-1).
/// Embedding: weight Shard(0) (rows of the vocabulary); pass input = Replicate{}.
struct RowwiseOptions {
  Placement input = Shard{-1};
  Placement output = Replicate{};  ///< Replicate: all-reduce; Shard: reduce-scatter
  bool use_local_output = true;
};
StylePtr rowwise_parallel(RowwiseOptions options = {});

/// Norms and dropout on activations sharded along the sequence; parameters replicated.
struct SequenceOptions {
  std::int64_t sequence_dim = 1;
  bool use_local_output = false;
};
StylePtr sequence_parallel(SequenceOptions options = {});

/// The same without a split sequence: parameters, input and output replicated, so that a norm takes
/// and gives distributed tensors. torchtitan's NoParallel.
struct ReplicateOptions {
  bool use_local_output = false;
};
StylePtr replicate_parallel(ReplicateOptions options = {});

/// Per tensor argument in order (nullopt: leave alone): what it is, and what forward wants.
struct PrepareInputOptions {
  std::vector<std::optional<Placement>> input{};
  std::vector<std::optional<Placement>> desired_input{};
  bool use_local_output = false;
};
StylePtr prepare_module_input(PrepareInputOptions options);

struct PrepareOutputOptions {
  std::vector<std::optional<Placement>> output{};
  std::vector<std::optional<Placement>> desired_output{};
  bool use_local_output = true;
};
StylePtr prepare_module_output(PrepareOutputOptions options);

/// Applies a plan on a 1-D mesh. Parameters of matched Linear, Embedding and norm modules become
/// distributed; those that no entry touches are left. Not collective (values are sliced, not sent).
/// Throws Error, before anything is changed, for a pattern that matches nothing or a style that
/// does not fit the module; the message lists what there is.
void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh, const Plan& plan);

}  // namespace tessera::tensor_parallel
