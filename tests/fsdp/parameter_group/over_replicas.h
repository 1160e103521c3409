#pragma once

// Models whose shards lie over the replicas, and what they gather.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "fsdp/training/training.h"

namespace tessera::testing {

inline const fsdp::Options kOverReplicas{.shard_over_replicas = true};

inline DeviceMesh hybrid_mesh(const Rank& rank, std::int64_t replicas, std::int64_t shards) {
  return rank.mesh({replicas, shards}, {"replicate", "shard"});
}

/// Calls of all-gathers over all ranks, and within the replica.
using Gathers = std::pair<std::int64_t, std::int64_t>;

/// Since `before`.
inline Gathers gathers(const Rank& rank, const comm::TrafficTable& before) {
  const comm::TrafficTable traffic = rank.world()->traffic().since(before);
  return {traffic_of(traffic, "replicate_shard", "all_gather").calls,
          traffic_of(traffic, "shard", "all_gather").calls};
}

/// Halves every shard in place.
inline void halve(nn::ModuleBase& model) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, slot] : model.named_slots()) {
    local_tensor(slot->persistent()).mul_(0.5);
  }
}

}  // namespace tessera::testing
