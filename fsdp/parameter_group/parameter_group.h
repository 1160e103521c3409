#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parameter/parameter_spec.h"
#include "parameter_group/gathered_state.h"
#include "parameter_group/gradient_state.h"
#include "parameter_group/parameter_group_shards.h"

namespace tessera::fsdp {

/// Parameters of one type, on one mesh, that are gathered in one all-gather and reduced in one
/// reduce-scatter: their shards, what is gathered of them, and their gradients.
class ParameterGroup {
 public:
  /// Shards the parameters, at least one. Not collective. `post_forward_mesh_size`: as the option.
  ParameterGroup(const std::vector<ParameterSpec>& specs, const MixedPrecisionPolicy& policy,
                 std::int64_t post_forward_mesh_size,
                 const std::shared_ptr<const Settings>& settings);

  const std::vector<ShardedParameter>& parameters() const { return shards_->parameters(); }
  std::vector<ShardedParameter>& parameters() { return shards_->parameters(); }
  const DataMesh& mesh() const { return shards_->mesh(); }
  GatheredState& gathered() { return gathered_; }
  const GatheredState& gathered() const { return gathered_; }
  GradientState& gradients() { return gradients_; }
  const GradientState& gradients() const { return gradients_; }

  /// Lays the shards out, and the unsharded tensors, where something was put into the slots or
  /// converted since. To be called before the first unshard of an iteration. Throws as
  /// ParameterGroupShards::adopt and lay_out. Otherwise collective.
  void prepare(CommContext& context);

  /// Forward begins to use the unsharded parameters.
  void begin_use() { shards_->begin_use(); }
  /// The name of an unsharded parameter that was written since, where the write would be lost; "":
  /// none.
  std::string lost_write() const { return shards_->lost_write(); }

  /// Adds the groups over which it gathers and reduce-scatters.
  void add_sharding_groups(std::vector<comm::Communicator*>& groups) {
    gathered_.add_groups(groups);
  }
  /// Adds the one, if any, over which it all-reduces.
  void add_replica_groups(std::vector<comm::Communicator*>& groups);

 private:
  std::unique_ptr<ParameterGroupShards> shards_;  ///< which stays where it is when this is moved
  GatheredState gathered_;
  GradientState gradients_;
};

}  // namespace tessera::fsdp
