// What a version of libtorch links but the fake does not offer: each call is a violation and
// returns an error. The real libraries would otherwise take these calls, with handles that are not
// theirs.
//
// NVIDIA's headers are left out, so that no parameters need be repeated: the caller passes and
// frees them, here they are not read.
#include <string>

#include "record/record.h"

namespace fake_cuda {
namespace {

constexpr int kCudaNotSupported = 801;   // cudaErrorNotSupported
constexpr int kCublasNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED
constexpr int kNcclInvalidUsage = 5;     // ncclInvalidUsage

int refuse(const char* call, int error) {
  count_violation(std::string(call) + " is not offered by the fake");
  return error;
}

}  // namespace
}  // namespace fake_cuda

#define REFUSED(call, error)                           \
  extern "C" int call() {                              \
    return fake_cuda::refuse(#call, fake_cuda::error); \
  }

REFUSED(cudaDeviceEnablePeerAccess, kCudaNotSupported)
REFUSED(cudaDeviceGetDefaultMemPool, kCudaNotSupported)
REFUSED(cudaDeviceGetGraphMemAttribute, kCudaNotSupported)
REFUSED(cudaDeviceSetGraphMemAttribute, kCudaNotSupported)
REFUSED(cudaFreeAsync, kCudaNotSupported)
REFUSED(cudaGraphAddNode, kCudaNotSupported)
REFUSED(cudaGraphConditionalHandleCreate, kCudaNotSupported)
REFUSED(cudaGraphDebugDotPrint, kCudaNotSupported)
REFUSED(cudaGraphNodeGetDependencies, kCudaNotSupported)
REFUSED(cudaGraphRetainUserObject, kCudaNotSupported)
REFUSED(cudaIpcCloseMemHandle, kCudaNotSupported)
REFUSED(cudaIpcGetEventHandle, kCudaNotSupported)
REFUSED(cudaIpcGetMemHandle, kCudaNotSupported)
REFUSED(cudaIpcOpenEventHandle, kCudaNotSupported)
REFUSED(cudaIpcOpenMemHandle, kCudaNotSupported)
REFUSED(cudaKernelSetAttributeForDevice, kCudaNotSupported)
REFUSED(cudaLibraryGetGlobal, kCudaNotSupported)
REFUSED(cudaLibraryGetKernel, kCudaNotSupported)
REFUSED(cudaLibraryGetKernelCount, kCudaNotSupported)
REFUSED(cudaLibraryGetManaged, kCudaNotSupported)
REFUSED(cudaLibraryGetUnifiedFunction, kCudaNotSupported)
REFUSED(cudaLibraryLoadData, kCudaNotSupported)
REFUSED(cudaLibraryLoadFromFile, kCudaNotSupported)
REFUSED(cudaLibraryUnload, kCudaNotSupported)
REFUSED(cudaMallocAsync, kCudaNotSupported)
REFUSED(cudaMallocManaged, kCudaNotSupported)
REFUSED(cudaMemPoolGetAttribute, kCudaNotSupported)
REFUSED(cudaMemPoolSetAccess, kCudaNotSupported)
REFUSED(cudaMemPoolSetAttribute, kCudaNotSupported)
REFUSED(cudaMemPoolTrimTo, kCudaNotSupported)
REFUSED(cudaMemcpy2DAsync, kCudaNotSupported)
REFUSED(cudaProfilerStart, kCudaNotSupported)
REFUSED(cudaProfilerStop, kCudaNotSupported)
REFUSED(cudaStreamBeginCaptureToGraph, kCudaNotSupported)
REFUSED(cudaStreamUpdateCaptureDependencies, kCudaNotSupported)
REFUSED(cudaUserObjectCreate, kCudaNotSupported)
REFUSED(cudaUserObjectRelease, kCudaNotSupported)

REFUSED(cublasCdotc_v2, kCublasNotSupported)
REFUSED(cublasCdotu_v2, kCublasNotSupported)
REFUSED(cublasCgelsBatched, kCublasNotSupported)
REFUSED(cublasCgemmStridedBatched, kCublasNotSupported)
REFUSED(cublasCgemm_v2, kCublasNotSupported)
REFUSED(cublasCgemv_v2, kCublasNotSupported)
REFUSED(cublasCgeqrfBatched, kCublasNotSupported)
REFUSED(cublasCgetrfBatched, kCublasNotSupported)
REFUSED(cublasCgetrsBatched, kCublasNotSupported)
REFUSED(cublasCtrsmBatched, kCublasNotSupported)
REFUSED(cublasCtrsm_v2, kCublasNotSupported)
REFUSED(cublasDgelsBatched, kCublasNotSupported)
REFUSED(cublasDgeqrfBatched, kCublasNotSupported)
REFUSED(cublasDgetrfBatched, kCublasNotSupported)
REFUSED(cublasDgetrsBatched, kCublasNotSupported)
REFUSED(cublasDtrsmBatched, kCublasNotSupported)
REFUSED(cublasDtrsm_v2, kCublasNotSupported)
REFUSED(cublasLtMatmulAlgoCheck, kCublasNotSupported)
REFUSED(cublasLtMatmulAlgoConfigGetAttribute, kCublasNotSupported)
REFUSED(cublasLtMatmulAlgoConfigSetAttribute, kCublasNotSupported)
REFUSED(cublasLtMatmulAlgoInit, kCublasNotSupported)
REFUSED(cublasSetSmCountTarget, kCublasNotSupported)
REFUSED(cublasSgelsBatched, kCublasNotSupported)
REFUSED(cublasSgeqrfBatched, kCublasNotSupported)
REFUSED(cublasSgetrfBatched, kCublasNotSupported)
REFUSED(cublasSgetrsBatched, kCublasNotSupported)
REFUSED(cublasStrsmBatched, kCublasNotSupported)
REFUSED(cublasStrsm_v2, kCublasNotSupported)
REFUSED(cublasZdotc_v2, kCublasNotSupported)
REFUSED(cublasZdotu_v2, kCublasNotSupported)
REFUSED(cublasZgelsBatched, kCublasNotSupported)
REFUSED(cublasZgemmStridedBatched, kCublasNotSupported)
REFUSED(cublasZgemm_v2, kCublasNotSupported)
REFUSED(cublasZgemv_v2, kCublasNotSupported)
REFUSED(cublasZgeqrfBatched, kCublasNotSupported)
REFUSED(cublasZgetrfBatched, kCublasNotSupported)
REFUSED(cublasZgetrsBatched, kCublasNotSupported)
REFUSED(cublasZtrsmBatched, kCublasNotSupported)
REFUSED(cublasZtrsm_v2, kCublasNotSupported)

REFUSED(ncclCommGetUniqueId, kNcclInvalidUsage)
REFUSED(ncclCommGrow, kNcclInvalidUsage)
REFUSED(ncclCommInitAll, kNcclInvalidUsage)
REFUSED(ncclCommMemStats, kNcclInvalidUsage)
REFUSED(ncclCommResume, kNcclInvalidUsage)
REFUSED(ncclCommRevoke, kNcclInvalidUsage)
REFUSED(ncclCommSuspend, kNcclInvalidUsage)
REFUSED(ncclCommWindowDeregister, kNcclInvalidUsage)
REFUSED(ncclCommWindowRegister, kNcclInvalidUsage)
REFUSED(ncclDevCommCreate, kNcclInvalidUsage)
REFUSED(ncclDevCommDestroy, kNcclInvalidUsage)
REFUSED(ncclGather, kNcclInvalidUsage)
REFUSED(ncclGetLsaMultimemDevicePointer, kNcclInvalidUsage)
REFUSED(ncclGetPeerDevicePointer, kNcclInvalidUsage)
REFUSED(ncclGroupSimulateEnd, kNcclInvalidUsage)
REFUSED(ncclPutSignal, kNcclInvalidUsage)
REFUSED(ncclSignal, kNcclInvalidUsage)
REFUSED(ncclWaitSignal, kNcclInvalidUsage)
REFUSED(ncclWinGetUserPtr, kNcclInvalidUsage)

#undef REFUSED
