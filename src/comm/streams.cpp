#include "tessera/comm/streams.h"

#include "cuda_backend.h"

namespace tessera::comm {
namespace {

class HostStreams final : public Streams {
 public:
  StreamEventPtr record(Lane) override { return nullptr; }
  void wait(Lane, const StreamEventPtr&) override {}
  void synchronize(const StreamEventPtr&) override {}

 private:
  void enter(Lane) override {}
  void leave() override {}
};

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

StreamsPtr make_streams(const std::string& device_type) {
  if (device_type == "cuda") {
    return cuda_backend().make_streams();
  }
  return std::make_shared<HostStreams>();
}

}  // namespace tessera::comm
