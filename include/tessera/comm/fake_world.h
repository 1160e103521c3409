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
/// Makes the Work of a call; nullptr: it is done when it returns.
using FakeStart = std::function<WorkPtr(const FakeCollective&)>;

/// As fake_world(), with `start` to say when a collective ends. Groups of one rank have no calls.
WorldPtr fake_world(int rank, int size, FakeStart start);

}  // namespace tessera::comm
TESSERA_API_END
