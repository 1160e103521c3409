#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <numeric>
#include <vector>

#include "tessera/comm/world.h"

namespace tessera::comm {

/// The group "all" of a world's ranks in order.
inline CommunicatorPtr group_of_all(World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.group(ranks, "all");
}

/// 1000 sender + 0, 1, 2, ...: shows who sent an element, and which one it is.
inline at::Tensor numbers_from(std::int64_t sender, std::int64_t count) {
  return at::arange(count, at::kLong).add(1000 * sender).to(at::kFloat);
}

}  // namespace tessera::comm
