// Collectives of ranks on several hosts, one flow of bytes a host: within a host through the memory
// that its ranks share, between hosts by the first rank of each, over Gloo.

#pragma once

#include "gloo/lazy_host_group.h"
#include "group_info.h"
#include "hierarchy/host_layout.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// The groups that a collective goes through. All are of ranks of `group`, and watched as it is.
struct HostGroups {
  GroupInfo group;
  HostLayout layout;
  CommunicatorPtr inside;    ///< the ranks of this host, in order
  GroupInfo between_info;    ///< of `between`, on every rank
  CommunicatorPtr between;   ///< the leaders, by host; nullptr on other ranks
  LazyHostGroup::Make flat;  ///< makes the group of all ranks over Gloo, for all-to-all
};

/// A call returns at once: a thread of the communicator runs the phases, one call after another.
/// Sums and products of 16-bit floats travel and add up in fp32, and so are rounded once, as in the
/// other back ends. All ranks get the same bits.
CommunicatorPtr make_hierarchical_communicator(HostGroups groups);

}  // namespace tessera::comm
