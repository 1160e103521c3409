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

// What an H200 refuses of a launch.

namespace fake_cuda {

/// The dynamic shared memory of a block, without and with an attribute of the kernel.
constexpr std::size_t kSharedBytes = std::size_t{48} << 10;
constexpr std::size_t kSharedBytesOptIn = std::size_t{227} << 10;

struct LaunchSizes {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
};

/// cudaSuccess if the launch may run, else the result of refuse_launch().
cudaError_t check_launch(const char* kernel, const LaunchSizes& sizes, std::size_t shared_limit);

/// Counts a violation, stores the error for cudaGetLastError(), and returns it.
cudaError_t refuse_launch(const std::string& what, cudaError_t error);

/// The last error of a launch of this thread.
cudaError_t last_launch_error();
void clear_launch_error();

// The kinds of memory: device memory, pinned and pageable host memory.

enum class MemoryKind { kPageable, kPinned, kDevice };

/// The kind of memory that holds `address`.
MemoryKind kind_of(const void* address);

/// How many bytes there are from `address` to the end of its memory; 0 for pageable memory.
std::size_t bytes_from(const void* address);

/// The address at which the fake accesses the memory that a program knows as `address`. Differs for
/// device memory, which the host may not access at the program's address.
void* view_of(const void* address);
template <class T>
T* view_of(T* address) {
  return static_cast<T*>(view_of(static_cast<const void*>(address)));
}

/// The device of device memory.
int device_of(const void* address);

// Streams that do their work in order, while the host continues.

/// A point in the work of a stream, which is reached or not.
class Completion {
 public:
  void finish();
  bool finished() const { return finished_; }
  void wait() const { finished_.wait(false); }
  /// When it was reached.
  std::chrono::steady_clock::time_point time() const { return time_; }

 private:
  std::chrono::steady_clock::time_point time_;
  std::atomic<bool> finished_ = false;
};
using CompletionPtr = std::shared_ptr<Completion>;

/// The object behind cudaStream_t. Never freed, since there are few.
class Stream {
 public:
  using Work = std::function<void()>;

  Stream(int device, int priority);

  std::int64_t id() const { return id_; }
  int device() const { return device_; }
  int priority() const { return priority_; }

  /// Submits work that never waits for another stream or rank. An idle stream runs it at once, in
  /// the calling thread.
  void submit(Work work) { add(std::move(work), /*may_wait=*/false); }

  /// Submits work that may wait. It runs in the stream's own thread, so that the host continues.
  void submit_waiting(Work work) { add(std::move(work), /*may_wait=*/true); }

  /// A point after all work so far.
  CompletionPtr mark();

  /// The stream waits for the point.
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
  bool busy_ = false;  ///< some work is running, which is not in the queue
  bool has_thread_ = false;
};

/// The stream of a handle; the device's default stream for null. Null after the stream's end.
Stream* find_stream(cudaStream_t handle);

/// All existing streams, for calls that wait for a device.
std::vector<Stream*> all_streams();

Stream* make_stream(int priority);
bool end_stream(cudaStream_t handle);

/// Blocks the calling thread until all streams are idle.
void wait_for_all_streams();

// The devices that the fake shows: H200s.

/// The calling thread's device.
int current_device();

/// Makes a context on the calling thread's device, which takes some hundred MiB of its memory.
void use_device();
bool has_context(int device);

}  // namespace fake_cuda
