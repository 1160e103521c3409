// Functions by which the ranks of a process group exchange numbers, strings and exceptions.
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

// All functions of this header are collective over `group`, and return the same value on every
// rank. `device`: the device of the group's tensors. If asynchronous redistributions can be
// pending, pass flush_pending_transfers(group). All functions throw PeerError.

/// Returns the numbers `own` of each rank; all ranks must pass equally many. Costs one all-gather.
std::vector<std::vector<std::int64_t>> gather_values(Communicator& group, c10::Device device,
                                                     const std::vector<std::int64_t>& own);

/// Returns the numbers `own` of each rank. The CPUs communicate: the call waits for no GPU work. In
/// a fake world (fake_world()) every rank has the numbers of this rank.
std::vector<std::vector<std::int64_t>> gather_on_hosts(Communicator& group,
                                                       const std::vector<std::int64_t>& own);

/// Returns the string `own` of rank `root` on every rank. A string may contain any bytes. Costs two
/// broadcasts: of the length, then of the string.
std::string broadcast_text(Communicator& group, c10::Device device, int root,
                           const std::string& own);

/// Returns the ranks whose number `own` differs from that of rank 0. Costs one all-gather.
std::vector<int> ranks_that_differ(Communicator& group, c10::Device device, std::int64_t own);

/// An exception that one of the ranks of a process group has thrown.
struct Failure {
  int rank = 0;
  std::string message;  ///< the exception's message in one line, never empty
};

/// Runs `work`, which must not communicate, and catches its exceptions. Returns the failure of the
/// first rank that threw, or nullopt.
std::optional<Failure> first_failure(Communicator& group, c10::Device device,
                                     const std::function<void()>& work);

}  // namespace tessera::comm
TESSERA_API_END
