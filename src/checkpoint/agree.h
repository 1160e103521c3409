#pragma once

#include <c10/core/DeviceType.h>

#include <functional>

#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Runs `work` on every rank, and throws Error on all of them if it threw on any: the message of
/// the first rank that failed. Collective over `group`, whose tensors live on `device`.
void agree(comm::Communicator& group, c10::DeviceType device, const std::function<void()>& work);

}  // namespace tessera::checkpoint
