// NCCL process groups, for libtessera_cuda.so.
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

// An NCCL process group, through c10d's ProcessGroupNCCL, which uses libtorch's streams and memory
// pool.
//
// Sources that include this header define USE_C10D_NCCL. libtorch 2.11 uses NCCL 2.28.9, 2.15 uses
// 2.30.7. src/comm compares the header's version with the loaded library's version.
//
// Canary: C10dNcclCanary, a test of libtorch itself, with a fake CUDA library (tests/fake_cuda).

using NcclProcessGroup = c10d::ProcessGroupNCCL;
using NcclProcessGroupPtr = c10::intrusive_ptr<NcclProcessGroup>;

struct NcclGroupPlace {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  std::string name;               ///< name of the process group in libtorch's flight record
  std::vector<int> ranks;         ///< world ranks of the group, for the flight record
  NcclProcessGroupPtr from = {};  ///< existing group that ncclCommSplit splits; nullptr: no split
  int color = 0;                  ///< ncclCommSplit's argument `color`
};
/// Makes an NCCL process group. Collective. Only this group may use `store`.
inline NcclProcessGroupPtr make_nccl_group(const StorePtr& store, const NcclGroupPlace& place) {
  // The group uses a stream of high priority, so that collectives do not wait for queued compute
  // kernels.
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

/// Initialises NCCL for the group and device now, not in the first collective. Collective.
inline void connect_gpu(NcclProcessGroup& group, c10::Device device) {
  group.eagerConnectSingleDevice(device);
}

/// Returns NCCL's communicator of a process group after connect_gpu().
inline ncclComm_t communicator_of(NcclProcessGroup& group) {
  return reinterpret_cast<ncclComm_t>(group.getCommPtr());
}

/// Returns libtorch's NCCL version in the format of NCCL_VERSION_CODE. libtorch itself stores the
/// three numbers of the version as 16-bit fields of one integer.
inline int nccl_of_libtorch() {
  const std::uint64_t packed = torch::cuda::nccl::version();
  constexpr std::uint64_t kPart = 0xffff;
  return static_cast<int>((packed >> 32) * 10000 + (packed >> 16 & kPart) * 100 + (packed & kPart));
}

// Whether the current stream is being captured into a CUDA graph; recorded events must then not be
// queried. CUDA's public function can create a context.
//
// Canary: C10dNcclCanary, a test of libtorch itself.

inline bool is_captured() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace tessera::detail
TESSERA_API_END
