#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

namespace tessera::detail {

/// A collective that was started, if one was needed, and the work on its result that remains.
struct Started {
  comm::WorkPtr work;
  std::function<at::Tensor()> rest;
};

/// Waits for the collective and does the remaining work.
at::Tensor finish(const Started& started);

class Transfer;

/// The transfers that a rank has started and not finished, oldest first. References are weak, since
/// the user of a result owns it: the destructor of an unused transfer finishes it, and its entry is
/// skipped. Thread safe, since a backward may finish a transfer that the forward has started.
class TransferQueue {
 public:
  std::uint64_t next_number();
  void add(std::uint64_t number, const comm::Communicator* group,
           const std::shared_ptr<Transfer>& transfer);
  /// Finishes all transfers with a lower number than `number`. A failed transfer stores its
  /// exception and throws it when its result is used.
  void finish_before(std::uint64_t number);
  /// One more than the number of the last transfer on `group`; 0 if there is none.
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

/// A collective that is waited for later, by any thread.
///
/// If wait() blocks the host, a rank waits for its transfers in the order of their start, not in
/// the order in which results are used. Otherwise ranks that use results in different orders would
/// deadlock.
class Transfer {
 public:
  /// Starts a transfer and adds it to the rank's queue. Returns nullptr if the device preserves the
  /// order of collectives, so that no queue is needed.
  static std::shared_ptr<Transfer> start(Started started, const comm::Communicator* group);
  Transfer(Started started, bool in_order);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  /// Finishes an unused transfer, because peers may wait for it; ignores failures.
  ~Transfer();

  /// Waits for the transfer and returns its result. If the collective failed, rethrows its
  /// exception at every call.
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

/// Waits for all transfers of this rank. Called before a synchronous collective. Failures are
/// thrown when the results are used.
void finish_transfers();
/// Waits for all transfers up to the last transfer on `group`. Called before another collective
/// starts.
void finish_transfers_on(const comm::Communicator& group);

}  // namespace tessera::detail
