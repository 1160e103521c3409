#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "group_info.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// Gloo over TCP between the ranks of `group`, for CPU tensors. `store` is this group's alone;
/// `address` is this host's, and the peers reach it. Collective. Reduce-scatter is an all-to-all
/// and a local sum: libtorch's own costs a whole all-reduce.
CommunicatorPtr make_gloo_communicator(const c10::intrusive_ptr<c10d::Store>& store,
                                       const GroupInfo& group, const std::string& address);

}  // namespace tessera::comm
