// Streams that do their work in order and beside the host, as a device's do.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace fake_cuda {

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

}  // namespace fake_cuda
