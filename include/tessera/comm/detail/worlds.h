// Fake worlds, in which only this rank exists (for planning), and functions that all worlds use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A collective in a fake world (fake_world()).
struct FakeCollective {
  const std::string& group;       ///< name of the collective's process group
  const std::vector<int>& ranks;  ///< ranks of this process group, numbered as in the world
  std::string collective;
  std::int64_t bytes = 0;  ///< bytes of the collective's input on this rank
};
/// A function that returns the Work of a collective in a fake world; nullptr if the collective is
/// already complete.
using FakeStart = std::function<WorkPtr(const FakeCollective&)>;

/// Makes a fake world like fake_world(), but `start` returns the Work of each collective. `start`
/// is not called for groups of one rank.
WorldPtr fake_world(int rank, int size, FakeStart start);

/// Makes a fake world like fake_world(), but on the meta device, so that a step needs no memory.
/// For planning.
WorldPtr meta_world(int rank, int size);

inline std::vector<int> ranks_of_world(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Makes this thread print each of libtorch's warnings in one line, and once for the whole job.
/// libtorch's warning handler is per thread, so each thread that can warn must call this function.
/// Does nothing before world_from_environment(), or if the thread has its own handler.
void take_warnings_of_thread();

}  // namespace tessera::comm
TESSERA_API_END
