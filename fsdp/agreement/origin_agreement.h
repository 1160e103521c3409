#pragma once

#include <cstdint>
#include <vector>

#include "parameter_group/parameter_group.h"

namespace tessera::fsdp {

/// Compares, once, where the ranks' shards come from: parts of different tensors fit together as
/// well as those of one, and train without an error.
class OriginAgreement {
 public:
  bool settled() const { return settled_; }
  /// The hash of all origins (ShardedParameter::origin) on this rank.
  static std::int64_t hash_of(const std::vector<const ParameterGroup*>& groups);
  /// `equal`: all ranks have the same hash. If not, they compare parameter by parameter: collective
  /// over the groups' meshes, between the hosts. Throws Error, on all ranks that share it, for a
  /// parameter whose shards come from other tensors.
  void settle(const std::vector<const ParameterGroup*>& groups, bool equal);

 private:
  bool settled_ = false;
};

}  // namespace tessera::fsdp
