#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "tessera/comm/communicator.h"

namespace tessera::detail {

/// A collective under way, and what is left to do on its result. No work: nothing is under way.
struct Started {
  comm::WorkPtr work;
  std::function<at::Tensor()> rest;
};

/// Waits and does the rest.
at::Tensor finish(const Started& started);

/// A collective that somebody waits for later, from any thread.
///
/// On CPU a rank's waits happen in the order of its starts, whichever result is used first: where
/// ranks use them in unlike orders each would otherwise wait for what the other has put off.
class Transfer {
 public:
  /// Notes that this thread has started a transfer on `group`; nullptr: on a device that keeps
  /// order by itself.
  static std::shared_ptr<Transfer> start(Started started, const comm::Communicator* group);
  Transfer(Started started, bool in_order);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  /// Peers may need this rank to go on, so a transfer that nobody used is finished all the same;
  /// its failure then goes unseen.
  ~Transfer();

  /// The result; throws what the collective threw, every time.
  const at::Tensor& finish();

 private:
  void complete();

  std::mutex mutex_;
  Started started_;
  bool in_order_;
  std::uint64_t number_;
  at::Tensor result_;
  std::exception_ptr error_;
};
using TransferPtr = std::shared_ptr<Transfer>;

/// Waits for all transfers that this thread has started: before a collective that is waited for at
/// once. Failures are thrown where the results are used.
void finish_transfers();
/// Those up to the last one on `group`: before another collective starts there.
void finish_transfers_on(const comm::Communicator& group);

}  // namespace tessera::detail
