// The state of a rank and of its threads, and the asynchronous transfers that a rank has started.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/dtensor/detail/random_parts.h"
#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// While a BelowAutograd exists, operators on local tensors go directly to their backend. Calls
/// need this scope, because autograd has already recorded the call.
class BelowAutograd {
 public:
  BelowAutograd()
      : guard_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
               c10::DispatchKeySet({kDistributedKey, kRandomKey})) {}

 private:
  ExcludeKeys guard_;
};

/// While a BelowFallback exists, operators do not reach the fallback on kDistributedKey. The
/// fallback needs the scope to redispatch a call to another kernel. Autograd is not affected.
class BelowFallback {
 public:
  BelowFallback() : guard_(kDistributedKey) {}

 private:
  ExcludeKeys guard_;
};

/// `work`: the started collective (nullptr: none needed). `rest` then computes the result.
struct Started {
  comm::WorkPtr work;
  std::function<at::Tensor()> rest;
};

at::Tensor finish(const Started& started);

class Transfer;

/// A rank's unfinished transfers, oldest first. The queue has weak references; the waiting tensor
/// owns the transfer. Thread safe, because autograd threads finish transfers of the forward.
class TransferQueue {
 public:
  std::uint64_t next_number();
  void add(std::uint64_t number, const comm::Communicator* group,
           const std::shared_ptr<Transfer>& transfer);
  /// Finishes all transfers whose sequence number is below `number`. Does not throw: a failed
  /// transfer throws when its result is used.
  void finish_before(std::uint64_t number);
  /// Returns the sequence number of the last transfer on `group`, plus one; 0 if there is none.
  std::uint64_t end_of(const comm::Communicator& group);

 private:
  struct Entry {
    std::uint64_t number;
    const comm::Communicator* group;
    std::weak_ptr<Transfer> transfer;
  };
  std::shared_ptr<Transfer> take_before(std::uint64_t number);

  std::mutex mutex_;
  std::deque<Entry> entries_;
  std::uint64_t started_ = 0;
};

struct TESSERA_API RankState;

/// An asynchronous collective, for whose result any thread can wait. If wait() blocks the host, a
/// rank finishes its transfers in starting order: different orders could deadlock.
class Transfer : NoCopy {
 public:
  /// Starts a transfer. With a `group`, adds the transfer to this rank's queue. `group` is nullptr
  /// if the device keeps collectives in order, so that no queue is needed.
  static std::shared_ptr<Transfer> start(Started started, const comm::Communicator* group);
  Transfer(Started started, bool in_order);
  /// If the result was never used, the destructor waits for the collective, because other ranks
  /// also wait for the collective. Ignores failures.
  ~Transfer();

  /// Waits for the transfer and returns its result. After a failure, every call throws the
  /// exception of the collective.
  const at::Tensor& finish();

 private:
  void complete();

  std::shared_ptr<RankState> rank_;  ///< the rank that started the transfer
  std::mutex mutex_;
  Started started_;
  bool in_order_;
  std::uint64_t number_;
  at::Tensor result_;
  std::exception_ptr error_;
};
using TransferPtr = std::shared_ptr<Transfer>;

/// Finishes all transfers of this rank. Called before a synchronous collective. Does not throw: a
/// failed transfer throws when its result is used.
void finish_transfers();
/// Finishes all transfers up to the last transfer on `group`.
void finish_transfers_on(const comm::Communicator& group);

}  // namespace tessera::detail

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// The state of a rank that lasts between operator calls. The rank's own thread and the autograd
/// threads that run its backward share this state.
struct RankState {
  /// Returns the state of this thread's rank. In a backward, the rank is that of the thread that
  /// made the running autograd node.
  static std::shared_ptr<RankState> here();
  RankState();

  std::atomic<std::int64_t> implicit_redistributions = 0;
  std::atomic<bool> strict;  ///< whether implicit communication throws outside of every StrictScope
  TransferQueue transfers;

  std::mutex mutex;  ///< protects `random`
  RandomState random;
};

}  // namespace tessera::detail
TESSERA_API_FOR_TEST_END

namespace tessera::detail {

/// The state of one thread. The threads of a rank share one RankState; each thread has its own
/// RankThread.
struct RankThread : private NoCopy {
  static RankThread& here();
  RankThread();
  ~RankThread();

  const std::uint64_t thread;  ///< id of the thread, as libtorch stores it in autograd nodes
  const std::shared_ptr<RankState> rank;
  /// The rank whose end-of-backward callback runs on this thread; nullptr if no such callback runs.
  std::shared_ptr<RankState> rank_of_callback;

  bool replicates = false;           ///< argument of the innermost ReplicationScope
  bool makes_meta = false;           ///< whether this thread is inside a MetaFactoryGuard
  const bool checks_calls;           ///< TESSERA_DEBUG, read once because each read is slow
  std::vector<std::string> modules;  ///< FQNs of the modules whose forwards are running
  at::Tensor random_source;          ///< `source` of the innermost RandomSourceScope
};

}  // namespace tessera::detail
