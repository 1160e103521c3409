#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A collective call in a process group of a fake world.
struct FakeCollective {
  const std::string& group;       ///< the group's name
  const std::vector<int>& ranks;  ///< world ranks
  std::string collective;
  std::int64_t bytes = 0;  ///< bytes of this rank's input
};
/// Returns the Work of a collective call in a fake group, or nullptr if the call is complete at
/// once.
using FakeStart = std::function<WorkPtr(const FakeCollective&)>;

/// Makes a fake world like fake_world(), but `start` decides when a collective ends. `start` is not
/// called for groups of one rank.
WorldPtr fake_world(int rank, int size, FakeStart start);

/// Makes a fake world like fake_world(), but with the device "meta": tensors have sizes and no
/// values, so that a step needs no memory. For planning.
WorldPtr meta_world(int rank, int size);

}  // namespace tessera::comm
TESSERA_API_END
