#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/core/placement.h"

namespace tessera::comm {

inline c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
  }
  return c10d::ReduceOp::SUM;
}

/// Counts of elements as counts of bytes.
inline std::vector<std::int64_t> counts_in_bytes(std::span<const std::int64_t> counts,
                                                 std::size_t item_bytes) {
  std::vector<std::int64_t> result;
  for (const std::int64_t count : counts) {
    result.push_back(count * static_cast<std::int64_t>(item_bytes));
  }
  return result;
}

}  // namespace tessera::comm
