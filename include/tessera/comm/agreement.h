#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

// All functions of this header are collective over `group`, and return the same value on every
// rank. `device`: the device of the group's tensors. All functions throw PeerError.

/// Returns the strings `own` of all ranks. A string may contain any bytes. Calls two
/// all-gathers. The first gathers the lengths. The second gathers the strings, padded to the
/// longest.
std::vector<std::string> gather_texts(Communicator& group, c10::Device device,
                                      const std::string& own);

/// Returns the strings `own` of all ranks if the strings differ, otherwise {}. The CPUs
/// communicate: the call waits for no GPU work.
std::vector<std::string> texts_that_differ(Communicator& group, const std::string& own);

/// Runs `work`, which must not communicate. If `work` throws on any rank, every rank throws Error
/// with the number and message of the first such rank.
void run_or_fail_together(Communicator& group, c10::Device device,
                          const std::function<void()>& work);

}  // namespace tessera::comm
TESSERA_API_END
