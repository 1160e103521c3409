// Loads libtessera_cuda.so and checks the versions of its NCCL and cuDNN.

#include <dlfcn.h>
#include <fmt/format.h>
#include <string>
#include <utility>

#include "cuda/cuda_backend.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/comm/detail/streams.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/devices.h"
#include "tessera/version.h"

namespace tessera::comm {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

void check_nccl(const LibraryVersions& versions) {
  TESSERA_CHECK(versions.nccl_header == versions.nccl_libtorch,
                "backend nccl: Tessera was built with the header of NCCL ",
                version_text(versions.nccl_header), ", but libtorch with the header of NCCL ",
                version_text(versions.nccl_libtorch),
                "; build Tessera with libtorch's version of nccl.h (-DTESSERA_NCCL_INCLUDE=DIR)");
  TESSERA_CHECK(
      versions.nccl_loaded >= versions.nccl_libtorch, "backend nccl: NCCL ",
      version_text(versions.nccl_loaded), " is loaded, but libtorch needs ",
      version_text(versions.nccl_libtorch),
      " or newer; run scripts/setup, or put a newer libnccl.so.2 first on LD_LIBRARY_PATH");
}

std::string cudnn_warning(const LibraryVersions& versions) {
  if (versions.cudnn_loaded == 0 || versions.cudnn_loaded >= versions.cudnn_libtorch) {
    return "";
  }
  return fmt::format(
      "cuDNN {} is loaded, but libtorch was built with cuDNN {}, so attention may use a slower "
      "kernel; run scripts/setup, or put libtorch's version of cuDNN first on LD_LIBRARY_PATH",
      version_text(versions.cudnn_loaded), version_text(versions.cudnn_libtorch));
}

// libtessera_cuda.so is loaded at the first use of a GPU, so that a program that uses only the CPU
// never maps CUDA's libraries.
namespace {

constexpr auto kLibrary = "libtessera_cuda.so." TESSERA_SOVERSION;

/// Loads libtessera_cuda.so. Throws Error if the library is missing or of another version, if
/// libtorch has not found CUDA, or if there is no GPU.
const CudaBackend& load() {
  const std::string path = detail::library_beside(reinterpret_cast<const void*>(&load), kLibrary);
  // The library is never unloaded, because its kernels and operators stay registered.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TESSERA_CHECK(library != nullptr, "device cuda: ", kLibrary, " cannot be loaded: ", dlerror(),
                "; build Tessera where the CUDA toolkit and NCCL are installed, or use device cpu");
  const auto function = reinterpret_cast<CudaBackendFunction>(dlsym(library, kCudaBackendSymbol));
  TESSERA_CHECK(function != nullptr, "device cuda: ", path,
                " belongs to another version of Tessera; install all libraries from one build");
  TESSERA_CHECK(detail::has_found_cuda(),
                "device cuda: earlier in this process libtorch was used without CUDA (by a "
                "backward on CPU, pinned memory or at::getAccelerator()), so libtorch does not "
                "search for CUDA again; make the World of device cuda before that use");
  const CudaBackend& backend = *function();
  TESSERA_CHECK(backend.device_count() > 0,
                "device cuda: no GPU is visible to this process; check nvidia-smi and "
                "CUDA_VISIBLE_DEVICES, or use device cpu");
  return backend;
}

}  // namespace

const CudaBackend& cuda_backend() {
  static const CudaBackend& backend = load();
  return backend;
}

namespace {

/// Implements Streams for the CPU. Operators on a CPU are complete when they return, so there is
/// nothing to wait for, and every event is nullptr.
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
  }
  return "unknown";
}

void Streams::begin_scope(Lane lane) {
  TESSERA_CHECK(!in_scope_.exchange(true), "a LaneScope of '", to_string(lane),
                "' began inside another LaneScope of the same Streams, on this thread or another "
                "thread; end the other LaneScope first, or use separate Streams for each thread");
  enter(lane);
}

void Streams::end_scope() {
  leave();
  in_scope_ = false;
}

StreamsPtr make_streams(c10::Device device) {
  if (device.is_cuda()) {
    return cuda_backend().make_streams(device.index());
  }
  return given_host_streams() != nullptr ? given_host_streams() : std::make_shared<HostStreams>();
}

StreamEventPtr record_event(c10::Device device) {
  return make_streams(device)->record(Lane::kCompute);
}

void set_host_streams(StreamsPtr streams) {
  given_host_streams() = std::move(streams);
}

}  // namespace tessera::comm
