#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/fsdp/custom_collectives.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// Who allocates memory: the caller's function, for a group; else the group; without one, libtorch.
struct MemorySource {
  comm::Communicator* group = nullptr;
  std::shared_ptr<const AllocateBuffer> function{};

  /// A flat tensor, not initialised. With a group it may be collective over it. Throws Error if the
  /// function returns anything else.
  at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options) const;
  friend bool operator==(const MemorySource&, const MemorySource&) = default;
};

/// Memory for communication: a buffer that one unit releases serves the next. Little memory is
/// idle: what does not fit the next request is freed before more is allocated.
class BufferPool {
 public:
  struct Buffer {
    at::Tensor tensor;      ///< what was asked for
    at::Tensor bytes;       ///< all of it
    comm::Lane lane;        ///< in which it was allocated
    MemorySource source{};  ///< that allocated it
  };

  BufferPool(comm::StreamsPtr streams, c10::Device device)
      : streams_(std::move(streams)), device_(device) {}

  /// `numel` elements of memory from `source`, not initialised, for use in `lane`, which waits for
  /// the buffer's last user. To be called where `lane` is current.
  Buffer acquire(std::int64_t numel, c10::ScalarType dtype, comm::Lane lane,
                 const MemorySource& source = {});
  /// Takes a buffer back that is in use until `event`.
  void release(Buffer buffer, comm::StreamEventPtr event);
  /// Frees a lane's idle memory; the lane waits for its last users.
  void drop(comm::Lane lane);
  /// Frees all that is idle.
  void clear();
  std::int64_t idle_bytes() const;

 private:
  struct Idle {
    at::Tensor bytes;
    comm::Lane lane;
    MemorySource source;
    comm::StreamEventPtr event;
  };

  std::vector<Idle>::iterator best_fit(std::int64_t bytes, comm::Lane lane,
                                       const MemorySource& source);

  comm::StreamsPtr streams_;
  c10::Device device_;
  std::vector<Idle> idle_;
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
