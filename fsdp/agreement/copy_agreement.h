#pragma once

#include <string>
#include <vector>

#include "group/parameter_group.h"
#include "tessera/dtensor/detail/replica_agreement.h"

namespace tessera::fsdp {

// Ranks hold copies of parameters: of all of them with replicas (HSDP, replicate()), and of the
// parameters that are not split among the ranks that shard.

/// Throws Error, on all ranks that hold copies of it, for a parameter of the unit that messages
/// call `label` whose copies differ. Collective over the groups' meshes; no traffic.
void check_copies(const std::vector<ParameterGroup>& groups, tessera::detail::Equality equality,
                  const std::string& label);
/// The same of their gradients.
void check_copies_of_gradients(const std::vector<ParameterGroup>& groups, const std::string& label);

}  // namespace tessera::fsdp
