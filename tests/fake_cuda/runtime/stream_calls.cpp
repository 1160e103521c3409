// cudaStream* and cudaEvent*.
#include <cuda_runtime_api.h>

#include <mutex>
#include <set>

#include "record/record.h"
#include "runtime/capture.h"
#include "runtime/device.h"
#include "runtime/stream.h"

namespace fake_cuda {
namespace {

/// What cudaEvent_t points to: the last record of the event.
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

/// Null, and a violation, for one that does not exist.
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

/// An event of a capture brings the waiting stream into it. A captured stream can't wait for what
/// happens outside of its graph.
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
