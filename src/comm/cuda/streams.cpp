// Lanes on a CPU, and the choice of the lanes by device. The CUDA ones are in
// cuda/cuda_streams.cpp.

#include "tessera/comm/streams.h"

#include <utility>

#include "cuda/cuda_backend.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// On a CPU work is done when its call returns. An event has always passed, so it is nullptr.
class HostStreams final : public Streams {
 public:
  StreamEventPtr record(Lane) override { return nullptr; }
  void wait(Lane, const StreamEventPtr&) override {}
  void synchronize(const StreamEventPtr&) override {}

 private:
  void enter(Lane) override {}
  void leave() override {}
};

StreamsPtr& given_host_streams() {
  static StreamsPtr given;
  return given;
}

}  // namespace

const char* to_string(Lane lane) {
  switch (lane) {
    case Lane::kCompute:
      return "compute";
    case Lane::kAllGather:
      return "all_gather";
    case Lane::kReduceScatter:
      return "reduce_scatter";
    case Lane::kAllReduce:
      return "all_reduce";
  }
  return "unknown";
}

void Streams::begin_scope(Lane lane) {
  TESSERA_CHECK(!in_scope_.exchange(true), "a LaneScope of '", to_string(lane),
                "' was begun within another one of the same streams, on this thread or a second "
                "one; end that first, or give each thread its own streams");
  enter(lane);
}

void Streams::end_scope() {
  leave();
  in_scope_ = false;
}

StreamsPtr make_streams(c10::Device device) {
  // Loads libtessera_cuda.so if nothing has done so yet.
  if (device.is_cuda()) {
    return cuda_backend().make_streams(device.index());
  }
  return given_host_streams() != nullptr ? given_host_streams() : std::make_shared<HostStreams>();
}

void set_host_streams(StreamsPtr streams) {
  given_host_streams() = std::move(streams);
}

}  // namespace tessera::comm
