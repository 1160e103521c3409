#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rank/rank_state.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// What one thread of a rank has by itself: nothing of it goes along to the thread that runs a
/// backward. RankState is what all threads of a rank share.
struct RankThread {
  static RankThread& here();
  RankThread();
  RankThread(const RankThread&) = delete;
  RankThread& operator=(const RankThread&) = delete;
  ~RankThread();

  const std::uint64_t thread;             ///< its number, as autograd's nodes have it
  const std::shared_ptr<RankState> rank;  ///< which this thread is, listed while the thread lives
  /// That of the callback at the end of a backward that this thread is in; nullptr: it is in none.
  std::shared_ptr<RankState> rank_of_callback;

  bool replicates = false;           ///< the innermost ReplicationScope's
  bool makes_meta = false;           ///< in a MetaFactoryGuard
  const bool checks_calls;           ///< TESSERA_DEBUG, too slow to read for each call
  std::vector<std::string> modules;  ///< the FQNs of those whose forward runs
  at::Tensor random_source;          ///< the innermost RandomSourceScope's
  std::optional<WeakTensor> zeros;   ///< see dispatch/fallback.cpp
};

}  // namespace tessera::detail
