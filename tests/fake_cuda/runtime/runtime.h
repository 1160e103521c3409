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

/// cudaSuccess where the launch may run, else what refuse_launch returns.
cudaError_t check_launch(const char* kernel, const LaunchSizes& sizes, std::size_t shared_limit);

/// Counts a violation. The error stays behind for cudaGetLastError(), where code after <<<...>>>
/// finds it, and is returned.
cudaError_t refuse_launch(const std::string& what, cudaError_t error);

/// The last error of a launch of this thread.
cudaError_t last_launch_error();
void clear_launch_error();

// What a card refuses of the addresses that a kernel is given.

/// Where in a kernel's argument the addresses are that it reads and writes by 16 bytes: of a fused
/// kernel of Tessera (src/kernels/device) that takes more than one element at a time.
std::vector<std::size_t> addresses_of_vector_call(const std::string& kernel);

/// cudaSuccess where each of these addresses of a device is a multiple of 16; else what
/// refuse_launch returns. On a card the kernel fails.
cudaError_t check_vector_call(const char* kernel, const void* argument,
                              const std::vector<std::size_t>& offsets);

// The host has no access to the memory of a device.

/// From now on a host that touches memory of a device leaves a violation in the report, with its
/// stack, and a line on standard error, and dies of the signal. Once a process.
void watch_host_access();

// Kernels of Tessera's own that compute on the fake as they do on a GPU.

/// What a launch with these arguments does; they are copied.
using HostForm = std::function<void()> (*)(void** arguments);

/// The host form of the kernel with this mangled name; null for kernels that compute nothing here.
HostForm host_form_of(const std::string& kernel);

// Which memory belongs to devices, and which of the host's is pinned.

enum class MemoryKind { kPageable, kPinned, kDevice };

/// The kind of memory that holds `address`.
MemoryKind kind_of(const void* address);

/// How many bytes there are from `address` to the end of its memory; 0 for pageable memory.
std::size_t bytes_from(const void* address);

/// Where the fake itself reads and writes what a program knows as `address`: another address for
/// device memory, which the host may not touch at its own; else the same.
void* view_of(const void* address);
template <class T>
T* view_of(T* address) {
  return static_cast<T*>(view_of(static_cast<const void*>(address)));
}

/// The device of device memory.
int device_of(const void* address);

// Streams that do their work in order and beside the host, as a device's do.

class Capture;

/// A point in a stream's work that it has reached or not yet.
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

/// What cudaStream_t points to. Never freed: there are few.
class Stream {
 public:
  using Work = std::function<void()>;

  Stream(int device, int priority);

  std::int64_t id() const { return id_; }
  int device() const { return device_; }
  int priority() const { return priority_; }

  /// Work that never waits for another stream or rank: an idle stream does it at once, in the
  /// calling thread.
  void submit(Work work) { add(std::move(work), /*may_wait=*/false); }

  /// Work that may wait, also for the host, gets the stream's own thread: the host continues.
  void submit_waiting(Work work) { add(std::move(work), /*may_wait=*/true); }

  /// A point after all work so far.
  CompletionPtr mark();

  /// The stream waits for the point.
  void wait_for(const CompletionPtr& point);

  /// The capture that takes this stream's work; null outside of one.
  std::shared_ptr<Capture> capture;

 private:
  void add(Work work, bool may_wait);
  void run();

  const std::int64_t id_;
  const int device_;
  const int priority_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool busy_ = false;  ///< work that has left the queue, or never was in it, is being done
  bool has_thread_ = false;
};

/// The stream of a handle; a null handle is the device's default stream. Null after its end.
Stream* find_stream(cudaStream_t handle);

/// All that live, for calls that wait for a whole device.
std::vector<Stream*> all_streams();

Stream* make_stream(int priority);
bool end_stream(cudaStream_t handle);

/// `issue` gives the stream some work: now or, where the stream is being captured, at each launch
/// of the graph.
void enqueue(Stream& stream, std::function<void(Stream&)> issue);

/// Blocks the calling thread until all streams are idle.
void wait_for_all_streams();

// Stream capture: what a stream is asked becomes a graph, and some calls are not allowed meanwhile.

class Stream;

/// One call that a graph repeats at each launch, on the stream that launches it.
using GraphNode = std::function<void(Stream&)>;

/// What cudaGraph_t points to. The nodes run in the order of capture, which satisfies every edge
/// that the graph would have.
struct Graph {
  std::vector<GraphNode> nodes;
};

/// One capture, with the streams that take part in it.
class Capture {
 public:
  Capture(Stream& origin, cudaStreamCaptureMode mode);

  std::uint64_t id() const { return id_; }
  Stream& origin() const { return origin_; }
  bool valid() const { return valid_; }
  void invalidate() { valid_ = false; }

  /// True if the capture's mode forbids unsafe calls of the calling thread.
  bool forbids_here() const;

  void add(Stream& stream, GraphNode node);

  /// How much `stream` was asked so far: what an event records.
  std::size_t position(Stream& stream);

  /// `waiting` waits for what `stream` was asked up to `position`, and takes part from now on.
  void wait(Stream& waiting, Stream& stream, std::size_t position);

  /// The streams but the origin whose last work nothing waits for. Empty in a correct capture.
  std::size_t unjoined_streams();

  std::vector<Stream*> streams();
  Graph take_graph();

 private:
  struct Part {
    std::size_t position = 0;
    bool joined = false;
  };

  const std::uint64_t id_;
  Stream& origin_;
  const cudaStreamCaptureMode mode_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::mutex mutex_;
  std::map<Stream*, Part> parts_;
  Graph graph_;
  bool valid_ = true;
};

/// For calls that are unsafe while something is captured: true if `call` is forbidden in this
/// thread. Then it is counted as a violation and the capture is invalid, as on a device.
bool forbidden_by_capture(const char* call);

/// The same of a call about a stream or an event that itself is captured (null if it is not), which
/// no mode allows.
bool forbidden_by_capture(const char* call, const std::shared_ptr<Capture>& capture);

// The devices that the fake shows: H200s.

/// The calling thread's device.
int current_device();

/// The calling thread's device gets a context, if it has none: some hundred MiB of its memory.
void use_device();
bool has_context(int device);

}  // namespace fake_cuda
