// Functions by which the ranks of a process group exchange values and failures.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/agreement.h"
#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

// All functions of this header are collective over `group`, wait for their result, and return the
// same value on every rank. `device` is the device of the group's tensors. Pass
// flush_pending_transfers(group) as `group` if asynchronous redistributions can be unfinished on
// this rank. Ranks are numbered as in the group. All functions throw PeerError.

/// Returns each rank's values. All ranks must pass equally many values. Costs one all-gather.
std::vector<std::vector<std::int64_t>> gather_values(Communicator& group, c10::Device device,
                                                     const std::vector<std::int64_t>& own);

/// Returns each rank's values, exchanged by Communicator::any_rank on the CPU: the call waits for
/// no GPU work and counts no traffic. In a fake world (fake_world()) every rank has the values of
/// this rank.
std::vector<std::vector<std::int64_t>> gather_on_hosts(Communicator& group,
                                                       const std::vector<std::int64_t>& own);

/// Returns the text `own` of rank `root` and ignores `own` of other ranks. A text can contain any
/// bytes. Costs two broadcasts: of the length, then of the text.
std::string broadcast_text(Communicator& group, c10::Device device, int root,
                           const std::string& own);

/// Returns the ranks whose value differs from rank 0's value. Costs one all-gather of one number.
std::vector<int> ranks_that_differ(Communicator& group, c10::Device device, std::int64_t own);

/// An exception that one of the ranks of a process group has thrown.
struct Failure {
  int rank = 0;
  std::string message;  ///< the exception's message in one line, never empty
};

/// Runs `work`, which must not communicate, and catches its exceptions. Returns the failure of the
/// first rank that threw; nullopt if no rank threw. Costs one all-reduce of one number; after a
/// failure, also two broadcasts.
///
///   if (const auto failure = comm::first_failure(group, device, [&] { write(file); })) {
///     fail("saving failed on rank ", failure->rank, ": ", failure->message);
///   }
std::optional<Failure> first_failure(Communicator& group, c10::Device device,
                                     const std::function<void()>& work);

}  // namespace tessera::comm
TESSERA_API_END
