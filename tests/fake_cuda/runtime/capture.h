// Stream capture: what a stream is asked becomes a graph, and some calls are not allowed meanwhile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fake_cuda {

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

}  // namespace fake_cuda
