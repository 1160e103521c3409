#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A point in the queue of a stream, for which other work can wait. On CUDA, the point is a CUDA
/// event.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
};
/// A shared pointer to an event; nullptr stands for a point that the stream has already passed.
using StreamEventPtr = std::shared_ptr<StreamEvent>;

/// Returns an event that is reached after all work now queued in the current stream of `device`.
StreamEventPtr record_event(c10::Device device);

}  // namespace tessera::comm
TESSERA_API_END
