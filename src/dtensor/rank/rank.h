// The state of a rank and of its threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/dtensor/detail/random_parts.h"
#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// During this scope, operators on local tensors go directly to their backend: without autograd,
/// view tracking, kDistributedKey (which a MetaDevice scope would otherwise include), and random
/// numbers by element (plain_random.cpp). Work on local tensors inside a call needs this scope,
/// because autograd has already recorded the call, and a plain argument may require grad.
class BelowAutograd {
 public:
  BelowAutograd()
      : guard_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
               c10::DispatchKeySet({kDistributedKey, kRandomKey})) {}

 private:
  ExcludeKeys guard_;
};

/// During this scope, operators do not reach the fallback on kDistributedKey. The fallback uses the
/// scope when it passes a call on. Autograd is not affected.
class BelowFallback {
 public:
  BelowFallback() : guard_(kDistributedKey) {}

 private:
  ExcludeKeys guard_;
};

}  // namespace tessera::detail

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// The state of a rank that persists between calls. A rank is a thread, together with the autograd
/// threads that run its backward.
struct RankState {
  /// The state of the rank that this thread works for. In a backward, this is the rank of the
  /// thread that ran the forward; otherwise this thread's own rank. A node that a backward has made
  /// (create_graph) belongs to the thread of that backward.
  static std::shared_ptr<RankState> here();
  RankState();

  std::atomic<std::int64_t> implicit_redistributions = 0;
  std::atomic<bool> strict;  ///< whether the rank is strict outside of every StrictScope

  std::mutex mutex;  ///< protects the members that are declared after the mutex
  RandomState random;
};

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

/// The state of one thread of a rank. All threads of a rank share one RankState, but each thread,
/// such as a thread that runs a backward, has its own RankThread.
struct RankThread : private NoCopy {
  static RankThread& here();
  RankThread();
  ~RankThread();

  const std::uint64_t thread;             ///< number of the thread, as autograd's nodes store it
  const std::shared_ptr<RankState> rank;  ///< own rank, registered while the thread exists
  /// The rank whose end-of-backward callback this thread is running; nullptr if none is running.
  std::shared_ptr<RankState> rank_of_callback;

  bool replicates = false;  ///< value of the innermost ReplicationScope
  bool makes_meta = false;  ///< whether this thread is inside a MetaFactoryGuard
  const bool checks_calls;  ///< value of TESSERA_DEBUG, which is too slow to read at each call
  std::vector<std::string> modules;  ///< FQNs of the modules whose forwards are running
  at::Tensor random_source;          ///< value of the innermost RandomSourceScope
};

}  // namespace tessera::detail
