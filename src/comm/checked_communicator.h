#pragma once

#include <memory>

#include "group_info.h"
#include "lazy_host_group.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"

namespace tessera::comm {

/// What stands in front of every communicator: checks the arguments of each call (so that a bad one
/// throws before any byte is moved), counts it in `traffic` unless the group is of one, forwards
/// it. Where `inner` does not compare calls, it keeps those with a purpose, and agree_on_calls()
/// compares them over `hosts`; nullptr: nowhere.
CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic,
                                          std::unique_ptr<LazyHostGroup> hosts = nullptr);

}  // namespace tessera::comm
