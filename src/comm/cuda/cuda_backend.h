// The interface to libtessera_cuda.so: a table of function pointers, which dlsym() finds. The
// interface has no CUDA types, so that libraries without CUDA can include this header.

#pragma once

#include <string>

#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/streams.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Versions of NCCL and cuDNN, encoded as in the libraries: NCCL 2.28.9 is 22809, cuDNN 9.19.0 is
/// 91900; 0 means unknown.
struct LibraryVersions {
  int nccl_header = 0;    ///< the version of the nccl.h with which libtessera_cuda.so was compiled
  int nccl_libtorch = 0;  ///< the version of the nccl.h with which libtorch was compiled
  int nccl_loaded = 0;
  int cudnn_libtorch = 0;
  int cudnn_loaded = 0;
};

/// Throws Error if NCCL cannot be used. libtorch and Tessera must be compiled with the same nccl.h.
/// The loaded NCCL must not be older than this nccl.h.
void check_nccl(const LibraryVersions& versions);
/// Returns a warning about features that the loaded cuDNN is too old for; "" if there are none.
std::string cudnn_warning(const LibraryVersions& versions);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END

namespace tessera::comm {

/// This rank's GPU for a new NCCL group, and the larger group from which the new group is split.
struct NcclPlace {
  int device = 0;
  /// The NCCL group from which the new group is split. All ranks of `parent` take part in the
  /// split. nullptr: the new group is made without a split.
  CommunicatorPtr parent = {};
};

/// The functions of libtessera_cuda.so that libtessera_comm calls through pointers. Without a link
/// to CUDA, programs on the CPU start faster and use less memory.
struct CudaBackend {
  int (*device_count)();
  void (*set_device)(int index);
  LibraryVersions (*versions)();
  /// Makes a process group that uses NCCL. Each process of the group has its own GPU. Collective.
  CommunicatorPtr (*make_nccl_communicator)(const detail::StorePtr& store, const GroupInfo& group,
                                            const NcclPlace& place);
  /// Returns the streams of GPU `device`; -1 means the current GPU.
  StreamsPtr (*make_streams)(int device);
};

/// Returns the streams of GPU `device`. Defined in libtessera_cuda.so; other libraries call the
/// function pointer CudaBackend::make_streams.
StreamsPtr make_cuda_streams(int device);
/// Makes a process group that uses NCCL. Defined in libtessera_cuda.so; other libraries call the
/// function pointer CudaBackend::make_nccl_communicator.
CommunicatorPtr make_nccl_communicator(const detail::StorePtr& store, const GroupInfo& group,
                                       const NcclPlace& place);

/// The name of the function in libtessera_cuda.so that returns the CudaBackend of the library.
constexpr auto kCudaBackendSymbol = "tessera_cuda_backend";
using CudaBackendFunction = const CudaBackend* (*)();

/// Returns the functions of libtessera_cuda.so. The first call loads the library. Throws Error
/// without the library or a GPU, or if libtorch was initialised without CUDA.
const CudaBackend& cuda_backend();

}  // namespace tessera::comm
