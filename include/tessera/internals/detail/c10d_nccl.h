// Process groups of NCCL, for libtessera_cuda.so.
#pragma once

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// A group of NCCL through c10d's ProcessGroupNCCL, which has libtorch's streams, memory pool and
// flight record. The public interface of NCCL has none of these.
//
// For libtessera_cuda.so: its sources define USE_C10D_NCCL, and have the header of libtorch's NCCL.
//
// Versions differ in their NCCL: 2.28.9 of 2.11, 2.30.7 of 2.15. comm compares the header's with
// the library that is loaded.
//
// Canary: C10dNcclCanary, on a stand-in for CUDA (tests/fake_cuda).

using NcclProcessGroup = c10d::ProcessGroupNCCL;
using NcclProcessGroupPtr = c10::intrusive_ptr<NcclProcessGroup>;

struct NcclGroupPlace {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  std::string name;               ///< for libtorch's flight record
  std::vector<int> ranks;         ///< world ranks, for the same
  NcclProcessGroupPtr from = {};  ///< a group that is split into several now; nullptr: none is
  int color = 0;                  ///< tells the groups of one split apart
};
/// Collective; `store` is this group's alone.
inline NcclProcessGroupPtr make_nccl_group(const StorePtr& store, const NcclGroupPlace& place) {
  // High priority: a collective starts when its input is ready, not behind the kernels that compute
  // has queued.
  auto options = NcclProcessGroup::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = place.timeout;
  options->group_name = place.name;
  for (const int rank : place.ranks) {
    options->global_ranks_in_group.push_back(static_cast<std::uint64_t>(rank));
  }
  if (place.from != nullptr) {
    options->split_from = place.from;
    options->split_color = place.color;
  }
  return c10::make_intrusive<NcclProcessGroup>(store, place.rank, place.size, std::move(options));
}

/// Connects a GPU of a group now instead of in its first collective. Collective.
inline void connect_gpu(NcclProcessGroup& group, c10::Device device) {
  group.eagerConnectSingleDevice(device);
}

/// The communicator of the connected GPU.
inline ncclComm_t communicator_of(NcclProcessGroup& group) {
  return reinterpret_cast<ncclComm_t>(group.getCommPtr());
}

/// In the format of NCCL_VERSION_CODE. libtorch packs three numbers into one.
inline int nccl_of_libtorch() {
  const std::uint64_t packed = torch::cuda::nccl::version();
  constexpr std::uint64_t kPart = 0xffff;
  return static_cast<int>((packed >> 32) * 10000 + (packed >> 16 & kPart) * 100 + (packed & kPart));
}

/// libtorch's record of this process's last calls of NCCL, as PyTorch's torchfrtrace reads it.
inline std::string nccl_record() {
  return c10d::dump_nccl_trace(/*includeCollectives=*/true, /*includeStackTraces=*/false,
                               /*onlyActive=*/false);
}

// Whether the current stream is captured into a CUDA graph. An event recorded there may not be
// queried later. The public function is CUDA's, which creates a context where there is none.
//
// For libtessera_cuda.so. No version differs.
//
// Canary: C10dNcclCanary.

inline bool is_captured() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace tessera::detail
TESSERA_API_END
