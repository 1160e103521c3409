#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A call in a fake group.
struct FakeCollective {
  const std::string& group;       ///< its name
  const std::vector<int>& ranks;  ///< world ranks
  std::string collective;
  std::int64_t bytes = 0;  ///< of this rank's input
};
/// Makes the Work of a call. If it returns nullptr, the call is complete when it returns.
using FakeStart = std::function<WorkPtr(const FakeCollective&)>;

/// As fake_world(), where `start` decides when a collective ends. Groups of one rank have no calls.
WorldPtr fake_world(int rank, int size, FakeStart start);

/// As fake_world() with the device "meta": tensors have sizes and no values, so that a step takes
/// no memory. For planning.
WorldPtr meta_world(int rank, int size);

}  // namespace tessera::comm
TESSERA_API_END
