#pragma once

#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"

namespace tessera::comm {

/// What stands in front of every communicator: checks the arguments of each call (so that a bad one
/// throws before any byte is moved), counts it in `traffic` unless the group is of one, forwards
/// it.
CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic);

}  // namespace tessera::comm
