#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fake_cuda {

/// Limits of a thread block's dynamic shared memory, in bytes: by default, and on request.
constexpr std::size_t kSharedBytes = std::size_t{48} << 10;
constexpr std::size_t kSharedBytesOptIn = std::size_t{227} << 10;

struct LaunchSizes {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
};

/// Returns cudaSuccess if the launch is possible, otherwise the result of refuse_launch().
cudaError_t check_launch(const char* kernel, const LaunchSizes& sizes, std::size_t shared_limit);

/// Counts a wrong launch, stores `error` for the next cudaGetLastError(), and returns `error`.
cudaError_t refuse_launch(const std::string& what, cudaError_t error);

cudaError_t last_launch_error();
void clear_launch_error();

enum class MemoryKind { kPageable, kPinned, kDevice };

MemoryKind kind_of(const void* address);

/// Returns the number of bytes from `address` to the end of the allocation; 0 for pageable memory.
std::size_t bytes_from(const void* address);

/// Returns the address at which the fake can access memory. For device memory, this address differs
/// from `address`, which the host must not access.
void* view_of(const void* address);
template <class T>
T* view_of(T* address) {
  return static_cast<T*>(view_of(static_cast<const void*>(address)));
}

int device_of(const void* address);

/// A mark in a stream's queue of work. The stream finishes the mark after all earlier work.
class Completion {
 public:
  void finish();
  bool finished() const { return finished_; }
  void wait() const { finished_.wait(false); }
  /// The time at which the stream finished the mark.
  std::chrono::steady_clock::time_point time() const { return time_; }

 private:
  std::chrono::steady_clock::time_point time_;
  std::atomic<bool> finished_ = false;
};
using CompletionPtr = std::shared_ptr<Completion>;

/// The object behind a cudaStream_t. Never freed, because there are few streams.
class Stream {
 public:
  using Work = std::function<void()>;

  Stream(int device, int priority);

  std::int64_t id() const { return id_; }
  int device() const { return device_; }
  int priority() const { return priority_; }

  /// Adds work that never waits for another stream or rank. On an idle stream, the calling thread
  /// runs the work at once.
  void submit(Work work) { add(std::move(work), /*may_wait=*/false); }

  /// Adds work that may wait for streams or ranks. The stream's own thread runs the work.
  void submit_waiting(Work work) { add(std::move(work), /*may_wait=*/true); }

  CompletionPtr mark();

  /// Work that is added to this stream later runs only after `point` is finished.
  void wait_for(const CompletionPtr& point);

 private:
  void add(Work work, bool may_wait);
  void run();

  const std::int64_t id_;
  const int device_;
  const int priority_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool busy_ = false;
  bool has_thread_ = false;
};

/// Returns the stream of a handle, or nullptr. A null handle stands for the default stream.
Stream* find_stream(cudaStream_t handle);

std::vector<Stream*> all_streams();

Stream* make_stream(int priority);
bool end_stream(cudaStream_t handle);

void wait_for_all_streams();

// The fake's devices have the properties of H200 GPUs.

int current_device();

/// Creates a CUDA context for the current device. On a real GPU, a context takes some hundred MiB.
void use_device();
bool has_context(int device);

}  // namespace fake_cuda
