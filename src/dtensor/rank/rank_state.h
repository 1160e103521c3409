#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "rank/transfer.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// What a rank counts and remembers from call to call. A rank is a thread, together with the
/// threads of autograd that run its backward.
struct RankState {
  /// The state of the rank that this thread works for: in a backward that of the thread that ran
  /// the forward, otherwise this thread's own. Nodes that a backward has made (create_graph) count
  /// as that backward's thread's.
  static std::shared_ptr<RankState> here();
  RankState();

  std::atomic<std::int64_t> implicit_redistributions = 0;
  std::atomic<bool> strict;  ///< outside of every StrictScope
  TransferQueue transfers;

  std::mutex mutex;  ///< for what follows
  RandomState random;
};

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END
