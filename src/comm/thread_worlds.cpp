#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "store_world.h"
#include "tessera/core/error.h"

namespace tessera::comm {

std::vector<WorldPtr> thread_worlds(int size, const WorldOptions& options) {
  TESSERA_CHECK(size >= 1, "thread_worlds: ", size, " ranks asked for; ask for at least one");
  check_options(options);
  TESSERA_CHECK(options.backend == "gloo", "thread_worlds: NCCL takes a process a rank; use gloo");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(options.timeout);
  const std::vector<std::string> hosts(static_cast<std::size_t>(size), "this process");
  std::vector<WorldPtr> worlds;
  for (int rank = 0; rank < size; ++rank) {
    worlds.push_back(make_store_world({store, rank, size, rank, hosts, ""}, options));
  }
  return worlds;
}

}  // namespace tessera::comm
