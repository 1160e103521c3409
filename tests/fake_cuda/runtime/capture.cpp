#include "runtime/capture.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "record/record.h"
#include "runtime/stream.h"

namespace fake_cuda {
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

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

void close(const Capture& capture) {
  const std::lock_guard lock(captures().mutex);
  std::erase_if(captures().open, [&](const auto& open) { return open.get() == &capture; });
}

}  // namespace

Capture::Capture(Stream& origin, cudaStreamCaptureMode mode)
    : id_(next_id()), origin_(origin), mode_(mode) {
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
  // The graph is not there before the end, and nodes have no handles.
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
