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
/// scope when it redispatches a call to another kernel. Autograd is not affected.
class BelowFallback {
 public:
  BelowFallback() : guard_(kDistributedKey) {}

 private:
  ExcludeKeys guard_;
};

/// A collective that was started (null if none was needed), and the remaining work on its result.
struct Started {
  comm::WorkPtr work;
  std::function<at::Tensor()> rest;
};

/// Waits for the collective, does the remaining work, and returns the result.
at::Tensor finish(const Started& started);

class Transfer;

/// A rank's transfers that have started and not finished, oldest first. The user of a result owns
/// the transfer, so the queue has weak references. The destructor of an unused transfer finishes
/// the transfer. Thread safe: a backward can finish a transfer that the forward has started.
class TransferQueue {
 public:
  std::uint64_t next_number();
  void add(std::uint64_t number, const comm::Communicator* group,
           const std::shared_ptr<Transfer>& transfer);
  /// Finishes all transfers with a lower number than `number`. A failed transfer stores its
  /// exception and throws it when its result is used.
  void finish_before(std::uint64_t number);
  /// One more than the number of the last transfer on process group `group`; 0 if there is none.
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

/// An asynchronous collective, for whose result any thread waits later.
///
/// If wait() blocks the host, a rank waits for its transfers in the order of their start, not in
/// the order in which results are used. Otherwise ranks that use results in different orders would
/// deadlock.
class Transfer : NoCopy {
 public:
  /// Starts a transfer and adds the transfer to the rank's queue. Returns nullptr if the device
  /// preserves the order of collectives, so that no queue is needed.
  static std::shared_ptr<Transfer> start(Started started, const comm::Communicator* group);
  Transfer(Started started, bool in_order);
  /// Finishes a transfer whose result was not used, because other ranks need it; ignores failures.
  ~Transfer();

  /// Waits for the transfer and returns its result. If the collective failed, rethrows the
  /// collective's exception at every call.
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

/// Waits for all transfers of this rank, before a synchronous collective. A failed transfer throws
/// when its result is used.
void finish_transfers();
/// Waits for all transfers up to the last transfer on process group `group`.
void finish_transfers_on(const comm::Communicator& group);

}  // namespace tessera::detail

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::detail {

/// The state of a rank that persists between operator calls. A rank is a thread, together with the
/// autograd threads that run its backward.
struct RankState {
  /// Returns the state of the rank for which this thread works. In a backward this is the rank of
  /// the thread that ran the forward. A node made during a backward (create_graph) belongs to the
  /// thread that ran this backward.
  static std::shared_ptr<RankState> here();
  RankState();

  std::atomic<std::int64_t> implicit_redistributions = 0;
  std::atomic<bool> strict;  ///< whether calls are strict outside of every StrictScope
  TransferQueue transfers;

  std::mutex mutex;  ///< protects the member `random`
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

  const std::uint64_t thread;             ///< number of the thread, as stored in autograd nodes
  const std::shared_ptr<RankState> rank;  ///< the thread's rank, registered while the thread exists
  /// The rank whose end-of-backward callback this thread is running; nullptr if none is running.
  std::shared_ptr<RankState> rank_of_callback;

  bool replicates = false;  ///< argument of this thread's innermost ReplicationScope
  bool makes_meta = false;  ///< whether this thread is inside a MetaFactoryGuard
  const bool checks_calls;  ///< value of TESSERA_DEBUG, read once because each read is slow
  std::vector<std::string> modules;  ///< FQNs of the modules whose forwards are running
  at::Tensor random_source;          ///< value of the thread's innermost RandomSourceScope
};

}  // namespace tessera::detail
