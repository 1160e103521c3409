#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"

namespace tessera::comm {

/// What libtessera_cuda.so gives to this library, which must not depend on CUDA: a program that
/// runs on CPU starts faster and takes less memory without CUDA's libraries.
struct CudaBackend {
  int (*device_count)();
  /// Of the calling thread.
  void (*set_device)(int index);
  /// Collective. NCCL between processes with a GPU each, on their current devices.
  CommunicatorPtr (*make_nccl_communicator)(const c10::intrusive_ptr<c10d::Store>& store,
                                            const GroupInfo& group);
  /// Of the current device.
  StreamsPtr (*make_streams)();
};

/// The symbol of libtessera_cuda.so that returns its CudaBackend.
constexpr auto kCudaBackendSymbol = "tessera_cuda_backend";
using CudaBackendFunction = const CudaBackend* (*)();

/// Loads libtessera_cuda.so at the first call. Throws Error if it is missing or finds no GPU.
const CudaBackend& cuda_backend();

}  // namespace tessera::comm
