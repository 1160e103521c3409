#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "record/record.h"
#include "runtime/runtime.h"

namespace fake_cuda {
namespace {

struct Streams {
  std::mutex mutex;
  std::set<Stream*> made;
  std::map<int, Stream*> of_device;
};

Streams& streams() {
  static auto* const once = new Streams;
  return *once;
}

std::int64_t next_stream_id() {
  static std::atomic<std::int64_t> last = 0;
  return ++last;
}

bool is_default(cudaStream_t handle) {
  return handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
}

Stream* default_stream() {
  const std::lock_guard lock(streams().mutex);
  Stream*& stream = streams().of_device[current_device()];
  if (stream == nullptr) {
    stream = new Stream(current_device(), 0);
  }
  return stream;
}

}  // namespace

void Completion::finish() {
  time_ = std::chrono::steady_clock::now();
  finished_ = true;
  finished_.notify_all();
}

Stream::Stream(int device, int priority)
    : id_(next_stream_id()), device_(device), priority_(priority) {
  const std::lock_guard lock(record().mutex);
  record().streams[id_] = {.device = device};
}

void Stream::add(Work work, bool may_wait) {
  std::unique_lock lock(mutex_);
  if (!may_wait && !busy_ && queue_.empty()) {
    // The mutex is unlocked while the work runs, so that other threads can add work.
    busy_ = true;
    lock.unlock();
    work();
    lock.lock();
    busy_ = false;
  } else {
    queue_.push_back(std::move(work));
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
  }
  changed_.notify_one();
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty() && !busy_; });
    Work work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    busy_ = false;
  }
}

CompletionPtr Stream::mark() {
  auto point = std::make_shared<Completion>();
  submit([point] { point->finish(); });
  return point;
}

void Stream::wait_for(const CompletionPtr& point) {
  if (!point->finished()) {
    submit_waiting([point] { point->wait(); });
  }
}

Stream* find_stream(cudaStream_t handle) {
  if (is_default(handle)) {
    return default_stream();
  }
  auto* const stream = reinterpret_cast<Stream*>(handle);
  const std::lock_guard lock(streams().mutex);
  if (streams().made.contains(stream)) {
    return stream;
  }
  count_violation("a stream that does not exist");
  return nullptr;
}

std::vector<Stream*> all_streams() {
  const std::lock_guard lock(streams().mutex);
  std::vector<Stream*> all(streams().made.begin(), streams().made.end());
  for (const auto& [device, stream] : streams().of_device) {
    all.push_back(stream);
  }
  return all;
}

Stream* make_stream(int priority) {
  use_device();
  auto* const stream = new Stream(current_device(), priority);
  const std::lock_guard lock(streams().mutex);
  streams().made.insert(stream);
  return stream;
}

bool end_stream(cudaStream_t handle) {
  const std::lock_guard lock(streams().mutex);
  return streams().made.erase(reinterpret_cast<Stream*>(handle)) == 1;
}

void wait_for_all_streams() {
  for (Stream* const stream : all_streams()) {
    stream->mark()->wait();
  }
}

}  // namespace fake_cuda

// libtorch asks for the capture mode before it allocates. No stream is ever captured, because CUDA
// graphs are not supported.

using namespace fake_cuda;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode of_thread = cudaStreamCaptureModeGlobal;
  std::swap(*mode, of_thread);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) {
    *id = 0;
  }
  return find_stream(handle) == nullptr ? cudaErrorInvalidResourceHandle : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

}  // extern "C"

namespace fake_cuda {
namespace {

/// The object behind cudaEvent_t.
struct Event {
  CompletionPtr point;
};

struct Events {
  std::mutex mutex;
  std::set<Event*> made;
};

Events& events() {
  static auto* const once = new Events;
  return *once;
}

/// Returns the event of a handle. If the event does not exist, counts an error and returns nullptr.
Event* find_event(cudaEvent_t handle) {
  auto* const event = reinterpret_cast<Event*>(handle);
  const std::lock_guard lock(events().mutex);
  if (events().made.contains(event)) {
    return event;
  }
  count_violation("an event that does not exist");
  return nullptr;
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  count_call("cudaStreamCreateWithPriority");
  *handle = reinterpret_cast<cudaStream_t>(make_stream(priority));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  count_call("cudaStreamDestroy");
  return end_stream(handle) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  *priority = stream->priority();
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  return stream->mark()->finished() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaStreamSynchronize");
  count_host_sync("cudaStreamSynchronize");
  stream->mark()->wait();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned) {
  Stream* const stream = find_stream(stream_handle);
  const Event* const event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaStreamWaitEvent");
  if (event->point != nullptr) {
    stream->wait_for(event->point);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data,
                                  unsigned) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaStreamAddCallback");
  stream->submit_waiting([=] { callback(handle, cudaSuccess, data); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaLaunchHostFunc");
  stream->submit_waiting([=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  count_call("cudaEventCreate");
  use_device();
  auto* const event = new Event;
  const std::lock_guard lock(events().mutex);
  events().made.insert(event);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Event* const event = find_event(handle);
  if (event == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaEventDestroy");
  const std::lock_guard lock(events().mutex);
  events().made.erase(event);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event_handle, cudaStream_t stream_handle,
                                     unsigned) {
  Event* const event = find_event(event_handle);
  Stream* const stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaEventRecord");
  event->point = stream->mark();
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  use_device();
  const Event* const event = find_event(handle);
  if (event == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  return event->point == nullptr || event->point->finished() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Event* const event = find_event(handle);
  if (event == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaEventSynchronize");
  count_host_sync("cudaEventSynchronize");
  if (event->point != nullptr) {
    event->point->wait();
  }
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const Event* const first = find_event(start);
  const Event* const last = find_event(end);
  if (first == nullptr || last == nullptr || first->point == nullptr || last->point == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  if (!first->point->finished() || !last->point->finished()) {
    return cudaErrorNotReady;
  }
  *milliseconds =
      std::chrono::duration<float, std::milli>(last->point->time() - first->point->time()).count();
  return cudaSuccess;
}

}  // extern "C"
