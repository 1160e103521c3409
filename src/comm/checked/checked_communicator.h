// The layer between the groups of a world and their back ends. A custom communicator that a program
// passes to a mesh is not wrapped, because the communicator usually uses groups that are already
// wrapped.

#pragma once

#include <memory>

#include "gloo/gloo.h"
#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Makes the wrapper of a communicator that a World makes. The wrapper checks the arguments of each
/// call, so that an invalid call throws before any byte is moved; counts the call in `traffic`,
/// unless the group has one rank; and forwards the call to `inner`. `hosts`: the group over which
/// agree_on_calls() compares the calls with a purpose; nullptr if `inner` compares each call
/// itself. Every message contains the name of the group and its world ranks.
CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic,
                                          std::unique_ptr<LazyHostGroup> hosts = nullptr);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
