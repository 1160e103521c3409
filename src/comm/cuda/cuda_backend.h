// The interface between this library and libtessera_cuda.so: a table of functions, found by name
// with dlsym(). It has no CUDA types, so that both libraries compile against it.

#pragma once

#include <string>

#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Versions as the libraries encode them: NCCL 2.28.9 is 22809, cuDNN 9.19.0 is 91900; 0 means
/// unknown.
struct LibraryVersions {
  int nccl_header = 0;    ///< of the nccl.h that libtessera_cuda.so was compiled with
  int nccl_libtorch = 0;  ///< of the nccl.h that libtorch was compiled with
  int nccl_loaded = 0;
  int cudnn_libtorch = 0;
  int cudnn_loaded = 0;
};

/// Throws Error if NCCL cannot be used. libtorch's options contain structures of nccl.h, so both
/// libraries must be compiled with the same nccl.h, and the loaded NCCL must support it.
void check_nccl(const LibraryVersions& versions);
/// A warning about features that an old cuDNN lacks; "" if there are none.
std::string cudnn_warning(const LibraryVersions& versions);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END

namespace tessera::comm {

/// The GPU of an NCCL group, and the group that it is split from.
struct NcclPlace {
  int device = 0;  ///< the index of this rank's GPU
  /// An NCCL group of more ranks. All of its ranks split groups from it in this call. nullptr: this
  /// group is made independently.
  CommunicatorPtr parent = {};
};

/// The functions of libtessera_cuda.so for this library, which must not depend on CUDA: a program
/// on the CPU starts faster and uses less memory without CUDA's libraries.
struct CudaBackend {
  int (*device_count)();
  /// Sets the current GPU of the calling thread.
  void (*set_device)(int index);
  LibraryVersions (*versions)();
  /// Makes a group over NCCL between processes with one GPU each. Collective.
  CommunicatorPtr (*make_nccl_communicator)(const detail::StorePtr& store, const GroupInfo& group,
                                            const NcclPlace& place);
  /// libtorch's record of this process's last NCCL calls, in the format of PyTorch's torchfrtrace.
  std::string (*nccl_record)();
  /// The streams of the GPU `device`; -1 means the current GPU.
  StreamsPtr (*make_streams)(int device);
};

/// The lanes of a GPU. Defined in libtessera_cuda.so; this library calls it through
/// CudaBackend::make_streams.
StreamsPtr make_cuda_streams(int device);
/// Defined in libtessera_cuda.so; this library calls it through
/// CudaBackend::make_nccl_communicator.
CommunicatorPtr make_nccl_communicator(const detail::StorePtr& store, const GroupInfo& group,
                                       const NcclPlace& place);

/// The name of the function in libtessera_cuda.so that returns its CudaBackend.
constexpr auto kCudaBackendSymbol = "tessera_cuda_backend";
using CudaBackendFunction = const CudaBackend* (*)();

/// Loads libtessera_cuda.so at the first call. Throws Error if the library is missing or finds no
/// GPU, or if libtorch has already been initialised without CUDA.
const CudaBackend& cuda_backend();

}  // namespace tessera::comm
