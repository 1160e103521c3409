// Collectives as sends and receives between pairs of ranks.
#pragma once

#include <nccl.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "nccl/communicator.h"
#include "nccl/transfers.h"
#include "runtime/stream.h"

namespace fake_cuda {

enum class Collective {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kBroadcast,
  kReduce,
  kSend,
  kReceive
};

std::string name_of(Collective collective);

/// One call of NCCL, with the meanings of its arguments there.
struct Operation {
  Collective collective;
  const void* send;
  void* receive;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int root;  ///< or the peer
  CommunicatorPtr communicator;
  Stream* stream;

  /// Bytes of this rank's input: what the traffic of a Communicator counts.
  std::size_t input_bytes() const;
};

/// Moves the data of operations that NCCL would run as one group: all at once, in any order among
/// them. False if a communicator was aborted or `deadline` has passed.
bool execute(std::vector<Operation> operations,
             std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);

}  // namespace fake_cuda
