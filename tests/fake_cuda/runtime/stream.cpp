#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "record/record.h"
#include "runtime/runtime.h"

namespace fake_cuda {
namespace {

struct Streams {
  std::mutex mutex;
  std::set<Stream*> made;
  std::map<int, Stream*> of_device;  ///< default streams
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
  record().streams[id_] = {.device = device, .priority = priority};
}

void Stream::add(Work work, bool may_wait) {
  std::unique_lock lock(mutex_);
  if (!may_wait && !busy_ && queue_.empty()) {
    // Work that other threads submit now goes to the queue.
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
    work = nullptr;  // its captures may be freed only outside of the lock
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

void enqueue(Stream& stream, std::function<void(Stream&)> issue) {
  if (stream.capture != nullptr) {
    stream.capture->add(stream, std::move(issue));
  } else {
    issue(stream);
  }
}

void wait_for_all_streams() {
  for (Stream* const stream : all_streams()) {
    stream->mark()->wait();
  }
}

namespace {

struct Captures {
  std::mutex mutex;
  std::vector<std::shared_ptr<Capture>> open;
};

Captures& captures() {
  static auto* const once = new Captures;
  return *once;
}

/// The calling thread's, as cudaThreadExchangeStreamCaptureMode() sets it.
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

std::uint64_t next_capture_id() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

void close(const Capture& capture) {
  const std::lock_guard lock(captures().mutex);
  std::erase_if(captures().open, [&](const auto& open) { return open.get() == &capture; });
}

}  // namespace

Capture::Capture(Stream& origin, cudaStreamCaptureMode mode)
    : id_(next_capture_id()), origin_(origin), mode_(mode) {
  parts_[&origin] = {};
}

bool Capture::forbids_here() const {
  if (mode_ == cudaStreamCaptureModeRelaxed || thread_mode == cudaStreamCaptureModeRelaxed) {
    return false;
  }
  return thread_ == std::this_thread::get_id() ||
         (mode_ == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal);
}

void Capture::add(Stream& stream, GraphNode node) {
  const std::lock_guard lock(mutex_);
  graph_.nodes.push_back(std::move(node));
  Part& part = parts_[&stream];
  ++part.position;
  part.joined = false;
}

std::size_t Capture::position(Stream& stream) {
  const std::lock_guard lock(mutex_);
  return parts_[&stream].position;
}

void Capture::wait(Stream& waiting, Stream& stream, std::size_t position) {
  const std::lock_guard lock(mutex_);
  Part& part = parts_[&waiting];
  ++part.position;
  part.joined = false;
  Part& other = parts_[&stream];
  other.joined = other.joined || other.position == position;
}

std::size_t Capture::unjoined_streams() {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(std::count_if(
      parts_.begin(), parts_.end(),
      [this](const auto& entry) { return entry.first != &origin_ && !entry.second.joined; }));
}

std::vector<Stream*> Capture::streams() {
  const std::lock_guard lock(mutex_);
  std::vector<Stream*> all;
  for (const auto& [stream, part] : parts_) {
    all.push_back(stream);
  }
  return all;
}

Graph Capture::take_graph() {
  const std::lock_guard lock(mutex_);
  return std::move(graph_);
}

bool forbidden_by_capture(const char* call) {
  std::shared_ptr<Capture> found;
  {
    const std::lock_guard lock(captures().mutex);
    for (const auto& capture : captures().open) {
      found = capture->forbids_here() ? capture : found;
    }
  }
  return forbidden_by_capture(call, found);
}

bool forbidden_by_capture(const char* call, const std::shared_ptr<Capture>& capture) {
  if (capture == nullptr) {
    return false;
  }
  capture->invalidate();
  count_violation(std::string(call) + " during a stream capture");
  return true;
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  count_call("cudaStreamBeginCapture");
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || handle == nullptr || stream->capture != nullptr) {
    count_violation("cudaStreamBeginCapture on the default stream, or on one that is captured");
    return cudaErrorStreamCaptureUnsupported;
  }
  stream->capture = std::make_shared<Capture>(*stream, mode);
  const std::lock_guard lock(captures().mutex);
  captures().open.push_back(stream->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  count_call("cudaStreamEndCapture");
  *graph = nullptr;
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || stream->capture == nullptr || &stream->capture->origin() != stream) {
    return cudaErrorIllegalState;
  }
  const std::shared_ptr<Capture> capture = stream->capture;
  close(*capture);
  for (Stream* const part : capture->streams()) {
    part->capture = nullptr;
  }
  if (capture->unjoined_streams() != 0) {
    count_violation("a capture ends, but its first stream does not wait for another one");
    return cudaErrorStreamCaptureUnjoined;
  }
  if (!capture->valid()) {
    return cudaErrorStreamCaptureInvalidated;
  }
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(capture->take_graph()));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  const Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  const std::shared_ptr<Capture> capture = stream->capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
            : capture->valid() ? cudaStreamCaptureStatusActive
                               : cudaStreamCaptureStatusInvalidated;
  // The graph does not exist before the end of the capture, and nodes have no handles.
  const auto clear = [](auto* out) {
    if (out != nullptr) {
      *out = {};
    }
  };
  clear(graph);
  clear(nodes);
  clear(edges);
  clear(count);
  if (id != nullptr) {
    *id = capture == nullptr ? 0 : capture->id();
  }
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long) {
  count_call("cudaGraphInstantiate");
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  count_call("cudaGraphLaunch");
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  for (const GraphNode& node : reinterpret_cast<Graph*>(executable)->nodes) {
    node(*stream);
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}

}  // extern "C"

// cudaStream* and cudaEvent*.

namespace fake_cuda {
namespace {

/// The object behind cudaEvent_t: the last record of the event.
struct Event {
  CompletionPtr point;  ///< null before the first record and after one that was captured
  std::shared_ptr<Capture> capture;
  Stream* stream = nullptr;
  std::size_t position = 0;  ///< in the capture
};

struct Events {
  std::mutex mutex;
  std::set<Event*> made;
};

Events& events() {
  static auto* const once = new Events;
  return *once;
}

/// Null, and a violation, for an event that does not exist.
Event* find_event(cudaEvent_t handle) {
  auto* const event = reinterpret_cast<Event*>(handle);
  const std::lock_guard lock(events().mutex);
  if (events().made.contains(event)) {
    return event;
  }
  count_violation("an event that does not exist");
  return nullptr;
}

void count_wait(const Stream& stream) {
  const std::lock_guard lock(record().mutex);
  ++record().streams[stream.id()].waits;
}

cudaError_t record_event(Event& event, Stream& stream) {
  event.stream = &stream;
  event.capture = stream.capture;
  if (stream.capture != nullptr) {
    event.point = nullptr;
    event.position = stream.capture->position(stream);
  } else {
    event.point = stream.mark();
  }
  return cudaSuccess;
}

/// A wait for an event of a capture makes the stream join the capture. A captured stream can't wait
/// for work outside of its graph.
cudaError_t wait_for_event(Stream& stream, const Event& event, bool external) {
  if (event.capture != nullptr) {
    if (stream.capture == nullptr) {
      stream.capture = event.capture;
    }
    stream.capture->wait(stream, *event.stream, event.position);
    return cudaSuccess;
  }
  if (stream.capture != nullptr && event.point != nullptr && !external) {
    stream.capture->invalidate();
    count_violation("a captured stream waits for an event from outside of the capture");
    return cudaErrorStreamCaptureIsolation;
  }
  if (stream.capture == nullptr && event.point != nullptr) {
    stream.wait_for(event.point);
  }
  return cudaSuccess;
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
  if (forbidden_by_capture("cudaStreamQuery", stream->capture)) {
    return cudaErrorStreamCaptureUnsupported;
  }
  return stream->mark()->finished() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  if (forbidden_by_capture("cudaStreamSynchronize", stream->capture)) {
    return cudaErrorStreamCaptureUnsupported;
  }
  count_call("cudaStreamSynchronize");
  count_host_sync("cudaStreamSynchronize");
  stream->mark()->wait();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle,
                                unsigned flags) {
  Stream* const stream = find_stream(stream_handle);
  const Event* const event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  count_call("cudaStreamWaitEvent");
  count_wait(*stream);
  return wait_for_event(*stream, *event, flags == cudaEventWaitExternal);
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data,
                                  unsigned) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  if (forbidden_by_capture("cudaStreamAddCallback", stream->capture)) {
    return cudaErrorStreamCaptureUnsupported;
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
  enqueue(*stream, [=](Stream& on) { on.submit_waiting([=] { function(data); }); });
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
  return record_event(*event, *stream);
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
  if (forbidden_by_capture("cudaEventQuery", event->capture) ||
      forbidden_by_capture("cudaEventQuery")) {
    return cudaErrorStreamCaptureUnsupported;
  }
  return event->point == nullptr || event->point->finished() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Event* const event = find_event(handle);
  if (event == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  if (forbidden_by_capture("cudaEventSynchronize", event->capture) ||
      forbidden_by_capture("cudaEventSynchronize")) {
    return cudaErrorStreamCaptureUnsupported;
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
