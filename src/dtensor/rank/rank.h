// The state of a rank and of its threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "rank/transfer.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// While it exists, operators on local tensors go straight to their backend: no autograd, no view
/// tracking, not to our own fallback (which a MetaDevice scope would otherwise include), and no
/// random numbers by the element (plain_random.cpp), which the call draws as a whole. For
/// work on local tensors in the course of a call: autograd has recorded the call on the wrappers
/// already, and a plain argument may require grad.
class BelowAutograd {
 public:
  BelowAutograd()
      : guard_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
               c10::DispatchKeySet({kDistributedKey, kRandomKey})) {}

 private:
  ExcludeKeys guard_;
};

/// While it exists, operators don't reach the library's fallback. For calls that pass through it:
/// autograd is not affected.
class BelowFallback {
 public:
  BelowFallback() : guard_(kDistributedKey) {}

 private:
  ExcludeKeys guard_;
};

}  // namespace tessera::detail

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// The state of a rank between calls. A rank is a thread, together with the threads of autograd
/// that run its backward.
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

namespace tessera::detail {

/// The state of one thread of a rank. A backward on another thread does not see it. All threads of
/// a rank share RankState.
struct RankThread {
  static RankThread& here();
  RankThread();
  RankThread(const RankThread&) = delete;
  RankThread& operator=(const RankThread&) = delete;
  ~RankThread();

  const std::uint64_t thread;             ///< its number, as autograd's nodes have it
  const std::shared_ptr<RankState> rank;  ///< which this thread is, listed while the thread lives
  /// The rank of the end-of-backward callback that this thread runs; nullptr: none.
  std::shared_ptr<RankState> rank_of_callback;

  bool replicates = false;           ///< the innermost ReplicationScope's
  bool makes_meta = false;           ///< in a MetaFactoryGuard
  const bool checks_calls;           ///< TESSERA_DEBUG, too slow to read for each call
  std::vector<std::string> modules;  ///< the FQNs of those whose forward runs
  at::Tensor random_source;          ///< the innermost RandomSourceScope's
  std::optional<WeakTensor> zeros;   ///< see dispatch/fallback.cpp
};

}  // namespace tessera::detail
