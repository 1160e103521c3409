// The lanes (streams) of a GPU. Part of libtessera_cuda.so: see cuda_backend.h.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <nvtx3/nvToolsExt.h>

#include <memory>
#include <optional>

#include "cuda/cuda_backend.h"
#include "cuda/events.h"

namespace tessera::comm {
namespace {

using c10::cuda::CUDAStream;

class CudaEvent final : public StreamEvent {
 public:
  explicit CudaEvent(const CUDAStream& stream) : event_(event_pool().take(stream.device_index())) {
    event_->record(stream);
  }
  void block(const CUDAStream& stream) { event_->block(stream); }
  void synchronize() const { event_->synchronize(); }

 private:
  std::shared_ptr<at::cuda::CUDAEvent> event_;
};

/// The lanes (streams) of a GPU. Not thread safe: LaneScope checks that the threads of forward and
/// backward never use the lanes at the same time.
class CudaStreams final : public Streams {
 public:
  // Collectives use high-priority streams, so that a collective starts as soon as its input is
  // ready, before kernels that are queued in the compute stream.
  explicit CudaStreams(c10::DeviceIndex device)
      : device_(device),
        all_gather_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_)),
        reduce_scatter_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_)) {}

  StreamEventPtr record(Lane lane) override { return std::make_shared<CudaEvent>(stream(lane)); }

  void wait(Lane lane, const StreamEventPtr& event) override {
    if (event != nullptr) {
      static_cast<CudaEvent&>(*event).block(stream(lane));
    }
  }

  void synchronize(const StreamEventPtr& event) override {
    if (event != nullptr) {
      static_cast<const CudaEvent&>(*event).synchronize();
    }
  }

  void note(const std::string& what) override { nvtxMarkA(what.c_str()); }

 private:
  void enter(Lane lane) override {
    compute_ = c10::cuda::getCurrentCUDAStream(device_);
    c10::cuda::setCurrentCUDAStream(stream(lane));
  }

  void leave() override {
    c10::cuda::setCurrentCUDAStream(*compute_);
    compute_.reset();
  }

  CUDAStream stream(Lane lane) const {
    switch (lane) {
      case Lane::kAllGather:
        return all_gather_;
      case Lane::kReduceScatter:
        return reduce_scatter_;
      case Lane::kCompute:
        break;
    }
    // Lane::kCompute: outside a LaneScope, the current stream; inside, the stream that was current
    // when the LaneScope began.
    return compute_ ? *compute_ : c10::cuda::getCurrentCUDAStream(device_);
  }

  c10::DeviceIndex device_;
  CUDAStream all_gather_;
  CUDAStream reduce_scatter_;
  /// The stream that was current before the LaneScope; nullopt outside of LaneScopes.
  std::optional<CUDAStream> compute_;
};

}  // namespace

StreamsPtr make_cuda_streams(int device) {
  return std::make_shared<CudaStreams>(device < 0 ? c10::cuda::current_device()
                                                  : static_cast<c10::DeviceIndex>(device));
}

}  // namespace tessera::comm
