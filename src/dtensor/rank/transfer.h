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

/// A collective that was started, and the remaining work on its result. `work` is nullptr if no
/// collective was needed.
struct Started {
  comm::WorkPtr work;
  std::function<at::Tensor()> rest;
};

/// Waits for it and does the rest.
at::Tensor finish(const Started& started);

class Transfer;

/// The transfers that a rank has started and not finished, oldest first. Weak, since the user of a
/// result owns it: an unused transfer is finished by its destructor, and its entry is skipped.
/// Thread safe, since a backward may finish what the forward has started.
class TransferQueue {
 public:
  std::uint64_t next_number();
  void add(std::uint64_t number, const comm::Communicator* group,
           const std::shared_ptr<Transfer>& transfer);
  /// Finishes all transfers with a lower number. A transfer keeps its failure, to throw it where
  /// its result is used.
  void finish_before(std::uint64_t number);
  /// One more than the number of the last transfer on `group`; 0: there is none.
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
/// Where the host waits, a rank waits for its transfers in the order of their start, not of the use
/// of their results. Otherwise ranks that use results in different orders would wait for each other
/// forever.
class Transfer {
 public:
  /// Puts the transfer, on `group`, into the rank's queue. nullptr: the device keeps the order.
  static std::shared_ptr<Transfer> start(Started started, const comm::Communicator* group);
  Transfer(Started started, bool in_order);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  /// Finishes an unused transfer: the peers may need this rank for theirs. A failure is then
  /// ignored.
  ~Transfer();

  /// The result; throws what the collective threw, every time.
  const at::Tensor& finish();

 private:
  void complete();

  std::shared_ptr<RankState> rank_;  ///< that has started it
  std::mutex mutex_;
  Started started_;
  bool in_order_;
  std::uint64_t number_;
  at::Tensor result_;
  std::exception_ptr error_;
};
using TransferPtr = std::shared_ptr<Transfer>;

/// Waits for all transfers of this rank: before a synchronous collective. Failures are thrown where
/// the results are used.
void finish_transfers();
/// Waits for those up to the last one on `group`: before another collective starts there.
void finish_transfers_on(const comm::Communicator& group);

}  // namespace tessera::detail
