#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

// How ranks compare what each of them has, or share a verdict that one of them has reached. All of
// these are collective over `group` and return the same on every rank. `device`: where the group's
// tensors lie. They wait for the result, so an asynchronous caller passes
// flush_pending_transfers(group). Ranks are numbered as in the group. Throw PeerError.

/// Whether `own` is true on any rank. One all-reduce of one number.
bool any_rank(Communicator& group, c10::Device device, bool own);

/// The values of each rank. All ranks give equally many. One all-gather.
std::vector<std::vector<std::int64_t>> gather_values(Communicator& group, c10::Device device,
                                                     const std::vector<std::int64_t>& own);

/// The same between the hosts, by Communicator::any_rank: no device is waited for, and no traffic
/// is counted. In a fake group every rank has this one's values.
std::vector<std::vector<std::int64_t>> gather_on_hosts(Communicator& group,
                                                       const std::vector<std::int64_t>& own);

/// The text of each rank, which may hold any bytes. Two all-gathers: the lengths, then the texts,
/// each as long as the longest.
std::vector<std::string> gather_texts(Communicator& group, c10::Device device,
                                      const std::string& own);

/// The texts of all ranks if some differ; empty if all are equal. Between the hosts, as
/// gather_on_hosts(), by a hash; the texts are sent only if they differ.
std::vector<std::string> texts_that_differ(Communicator& group, const std::string& own);

/// The text of rank `root`, which may hold any bytes; those of the others are not looked at. Two
/// broadcasts: the length, then the text.
std::string broadcast_text(Communicator& group, c10::Device device, int root,
                           const std::string& own);

/// The ranks whose `own` is not rank 0's. One all-gather of one number.
std::vector<int> ranks_that_differ(Communicator& group, c10::Device device, std::int64_t own);

/// An exception on one of the ranks.
struct Failure {
  int rank = 0;
  std::string message;  ///< one line, never empty
};

/// Runs `work`, which must not communicate, and catches its exceptions. Returns the failure of the
/// first rank that threw; nullopt if none did. One all-reduce of one number; in case of a failure
/// two broadcasts as well.
///
///   if (const auto failure = comm::first_failure(group, device, [&] { write(file); })) {
///     fail("saving failed on rank ", failure->rank, ": ", failure->message);
///   }
std::optional<Failure> first_failure(Communicator& group, c10::Device device,
                                     const std::function<void()>& work);

/// The same, but every rank throws an Error with that message: no rank goes on and waits for one
/// that has failed.
void run_or_fail_together(Communicator& group, c10::Device device,
                          const std::function<void()>& work);

}  // namespace tessera::comm
TESSERA_API_END
