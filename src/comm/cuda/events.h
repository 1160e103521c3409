// A pool of CUDA events, for the sources of libtessera_cuda.so.

#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tessera::comm {

/// A pool of CUDA events without timing, because creating and destroying events costs CPU time.
/// Thread safe.
class EventPool {
 public:
  /// Returns an event for GPU `device`. The last owner returns the event to the pool. Recording the
  /// event again does not change a stream's earlier wait.
  std::shared_ptr<at::cuda::CUDAEvent> take(c10::DeviceIndex device) {
    return {take_unused(device).release(), [this, device](at::cuda::CUDAEvent* event) {
              const std::lock_guard lock(mutex_);
              unused_[device].emplace_back(event);
            }};
  }

 private:
  std::unique_ptr<at::cuda::CUDAEvent> take_unused(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    auto& unused = unused_[device];
    if (unused.empty()) {
      return std::make_unique<at::cuda::CUDAEvent>();
    }
    std::unique_ptr<at::cuda::CUDAEvent> event = std::move(unused.back());
    unused.pop_back();
    return event;
  }

  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::vector<std::unique_ptr<at::cuda::CUDAEvent>>> unused_;
};

/// The pool of events of this process. The pool is never destroyed, because its destructor could
/// run after CUDA has ended.
inline EventPool& event_pool() {
  static auto& pool = *new EventPool;
  return pool;
}

}  // namespace tessera::comm
