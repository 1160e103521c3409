// A group as the rest of FSDP sees it: shards, gathered state and gradient state, and the one
// moment at which all three are laid out anew.

#include "parameter_group/parameter_group.h"

namespace tessera::fsdp {
namespace {

std::unique_ptr<ParameterGroupShards> shard_all(const std::vector<ParameterSpec>& specs,
                                                const MixedPrecisionPolicy& policy) {
  // ShardedParameter's constructor puts each shard into its slot: from here on the model is
  // sharded. checked_spec has refused before what would fail halfway.
  std::vector<ShardedParameter> parameters;
  for (const ParameterSpec& spec : specs) {
    parameters.emplace_back(spec);
  }
  return std::make_unique<ParameterGroupShards>(std::move(parameters), specs.front().mesh, policy);
}

}  // namespace

ParameterGroup::ParameterGroup(const std::vector<ParameterSpec>& specs,
                               const MixedPrecisionPolicy& policy,
                               std::int64_t post_forward_mesh_size,
                               const std::shared_ptr<const Settings>& settings)
    : shards_(shard_all(specs, policy)),
      gathered_(*shards_, post_forward_mesh_size, settings),
      gradients_(*shards_, settings) {}

void ParameterGroup::prepare(CommContext& context) {
  // Cheap where nothing has changed, since every iteration begins with it: pointers are compared.
  const bool replaced = shards_->adopt();
  if (!replaced && shards_->laid_out()) {
    return;
  }
  // What is gathered has the old memory or type.
  gathered_.reshard(context);
  shards_->lay_out();
  gathered_.lay_out(context);
}

void ParameterGroup::add_replica_groups(std::vector<comm::Communicator*>& groups) {
  if (mesh().replicas() > 1) {
    groups.push_back(&mesh().replicate.group());
  }
}

}  // namespace tessera::fsdp
