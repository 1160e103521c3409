// The seam between this library and libtessera_cuda.so: a table of functions, found by name with
// dlsym(). It has no CUDA types, so that both sides compile against it.

#pragma once

#include <string>

#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// As the libraries write them: NCCL 2.28.9 is 22809, cuDNN 9.19.0 is 91900; 0: not known.
struct LibraryVersions {
  int nccl_header = 0;    ///< of the nccl.h that libtessera_cuda.so was compiled with
  int nccl_libtorch = 0;  ///< of the one that libtorch was compiled with
  int nccl_loaded = 0;
  int cudnn_libtorch = 0;
  int cudnn_loaded = 0;
};

/// Throws Error where NCCL cannot be used: libtorch's options hold structures of nccl.h, which must
/// be one for both, and what is loaded must know them.
void check_nccl(const LibraryVersions& versions);
/// A warning about features that an old cuDNN lacks; "": nothing.
std::string cudnn_warning(const LibraryVersions& versions);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END

namespace tessera::comm {

/// Where a group of NCCL's is made, and of what.
struct NcclPlace {
  int device = 0;  ///< the GPU of this rank
  /// A group of NCCL's of more ranks, from which all of them split groups now; nullptr: this group
  /// is made on its own.
  CommunicatorPtr parent = {};
};

/// What libtessera_cuda.so gives to this library, which must not depend on CUDA: a program that
/// runs on CPU starts faster and takes less memory without CUDA's libraries.
struct CudaBackend {
  int (*device_count)();
  /// Sets the current GPU of the calling thread.
  void (*set_device)(int index);
  LibraryVersions (*versions)();
  /// Collective. NCCL between processes with a GPU each.
  CommunicatorPtr (*make_nccl_communicator)(const detail::StorePtr& store, const GroupInfo& group,
                                            const NcclPlace& place);
  /// libtorch's record of this process's last calls of NCCL, as PyTorch's torchfrtrace reads it.
  std::string (*nccl_record)();
  /// The streams of that GPU; -1: of the current one.
  StreamsPtr (*make_streams)(int device);
};

/// Lanes on a GPU. In libtessera_cuda.so itself: others call it through CudaBackend::make_streams.
StreamsPtr make_cuda_streams(int device);
/// Likewise.
CommunicatorPtr make_nccl_communicator(const detail::StorePtr& store, const GroupInfo& group,
                                       const NcclPlace& place);

/// The symbol of libtessera_cuda.so that returns its CudaBackend.
constexpr auto kCudaBackendSymbol = "tessera_cuda_backend";
using CudaBackendFunction = const CudaBackend* (*)();

/// Loads libtessera_cuda.so at the first call. Throws Error if it is missing or finds no GPU, or if
/// libtorch has started without CUDA before.
const CudaBackend& cuda_backend();

}  // namespace tessera::comm
