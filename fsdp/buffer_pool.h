#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"

namespace tessera::fsdp {

/// Memory for communication: a buffer that one unit gives back serves the next. Little is idle at a
/// time: what does not fit the next request is freed before more is allocated.
class BufferPool {
 public:
  struct Buffer {
    at::Tensor tensor;                    ///< what was asked for
    at::Tensor bytes;                     ///< all of it
    comm::Lane lane;                      ///< in which it was allocated
    comm::Communicator* group = nullptr;  ///< that allocated it, if one did
  };

  BufferPool(comm::StreamsPtr streams, c10::Device device)
      : streams_(std::move(streams)), device_(device) {}

  /// `numel` elements, not initialised, for use in `lane`, which waits until whoever had the buffer
  /// before is done with it. To be called where `lane` is current. With a `group` it is memory that
  /// the group allocates: collective over it.
  Buffer acquire(std::int64_t numel, c10::ScalarType dtype, comm::Lane lane,
                 comm::Communicator* group = nullptr);
  /// Takes a buffer back that is in use until `event`.
  void release(Buffer buffer, comm::StreamEventPtr event);
  /// Frees what is idle.
  void clear();
  std::int64_t idle_bytes() const;

 private:
  struct Idle {
    at::Tensor bytes;
    comm::Lane lane;
    comm::Communicator* group;
    comm::StreamEventPtr event;
  };

  std::vector<Idle>::iterator best_fit(std::int64_t bytes, comm::Lane lane,
                                       const comm::Communicator* group);
  void drop(comm::Lane lane);

  comm::StreamsPtr streams_;
  c10::Device device_;
  std::vector<Idle> idle_;
};

}  // namespace tessera::fsdp
