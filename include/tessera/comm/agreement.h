#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

// All functions of this header are collective over `group` and return the same value on every rank.
// `device` is the device of the group's tensors. Ranks are numbered as in the group. All functions
// throw PeerError.

/// Returns the strings `own` of all ranks. A string may contain any bytes. Costs two all-gathers:
/// of the lengths, then of the strings, padded to the longest string.
std::vector<std::string> gather_texts(Communicator& group, c10::Device device,
                                      const std::string& own);

/// Returns the strings `own` of all ranks if they differ, or {} if all strings are equal. The CPUs
/// exchange hashes, and the strings only if the hashes differ. Waits for no GPU work and counts no
/// traffic.
std::vector<std::string> texts_that_differ(Communicator& group, const std::string& own);

/// Runs `work`, which must not communicate. If `work` throws on any rank, every rank throws an
/// Error with the number and the message of the first rank that failed, so that no rank waits for
/// that rank. Costs an all-reduce of one number, and two broadcasts after a failure.
void run_or_fail_together(Communicator& group, c10::Device device,
                          const std::function<void()>& work);

}  // namespace tessera::comm
TESSERA_API_END
