// Settings of a thread for operators on distributed tensors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/core/detail/no_copy.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/threads.h"

TESSERA_API_BEGIN
namespace tessera {

/// While an OperatorModePause exists, no OperatorMode intercepts operators of this thread. The
/// library uses the scope for internal work that is not part of the user's computation.
class OperatorModePause {
 public:
  OperatorModePause();

 private:
  detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*> scope_;
};

/// Returns the OperatorMode that is active on this thread, or nullptr if there is none.
OperatorMode* active_operator_mode();

/// Whether implicit communication throws Error on this thread (StrictScope).
bool is_strict();

/// Whether operators on this thread treat plain tensors as replicated. True in a ReplicationScope
/// and in libtorch's gradient formulas. False in a backward's hooks and functions that the program
/// defines.
bool plain_tensors_are_replicated();

/// Empties this thread's dispatch cache. This releases the meshes to which cached call plans refer.
/// Must not be called from within an operator.
void clear_dispatch_cache();

}  // namespace tessera

namespace tessera::detail {

/// Statistics of dispatch caches. A dispatch cache stores call plans, which describe how operator
/// calls are run. Every thread has a dispatch cache, including autograd's threads.
struct DispatchCacheStatistics {
  std::size_t plans = 0;     ///< number of call plans that are in the cache now
  std::size_t capacity = 0;  ///< maximum number of call plans in the cache
  /// Number of operator calls whose call plan was found in the cache, since the threads started.
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;  ///< number of operator calls whose call plan was not in the cache
};
/// Returns the statistics, summed over the dispatch caches of this thread and of the threads that
/// run this thread's backwards. Must not be called while a backward runs.
DispatchCacheStatistics dispatch_cache_statistics();

/// While a MetaFactoryGuard exists, factory functions on this thread make meta tensors, unless the
/// caller passes a device. Implements nn::MetaDevice. Scopes nest.
class MetaFactoryGuard : NoCopy {
 public:
  MetaFactoryGuard();
  ~MetaFactoryGuard();

 private:
  bool outer_;
  /// Enables the dispatch key kDistributedKey on this thread, so that even operators without
  /// distributed tensors reach the fallback kernel of this key.
  IncludeKeys guard_;
};

/// Whether this thread is inside a MetaFactoryGuard scope.
bool makes_meta_tensors();

}  // namespace tessera::detail
TESSERA_API_END
