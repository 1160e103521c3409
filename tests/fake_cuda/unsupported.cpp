// Functions of CUDA, cuBLAS and NCCL that libtorch links to, but that the fake does not support.
// Each function counts a violation and returns an error. Otherwise the real library would be
// called. Parameters are unused and therefore not declared.
#include <string>

#include "record/record.h"

namespace fake_cuda {
namespace {

constexpr int kCudaNotSupported = 801;
constexpr int kCublasNotSupported = 15;
constexpr int kNcclInvalidUsage = 5;

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
#define CUDA(call) REFUSED(call, kCudaNotSupported)
#define CUBLAS(call) REFUSED(call, kCublasNotSupported)
#define NCCL(call) REFUSED(call, kNcclInvalidUsage)

// clang-format off: several calls a line
CUDA(cudaDeviceEnablePeerAccess) CUDA(cudaDeviceGetDefaultMemPool)
CUDA(cudaDeviceGetGraphMemAttribute) CUDA(cudaDeviceSetGraphMemAttribute) CUDA(cudaFreeAsync)
CUDA(cudaGraphAddNode) CUDA(cudaGraphConditionalHandleCreate) CUDA(cudaGraphDebugDotPrint)
CUDA(cudaGraphDestroy) CUDA(cudaGraphExecDestroy) CUDA(cudaGraphGetNodes) CUDA(cudaGraphInstantiate)
CUDA(cudaGraphInstantiateWithFlags) CUDA(cudaGraphLaunch) CUDA(cudaGraphNodeGetDependencies)
CUDA(cudaGraphRetainUserObject) CUDA(cudaIpcCloseMemHandle) CUDA(cudaIpcGetEventHandle)
CUDA(cudaIpcGetMemHandle) CUDA(cudaIpcOpenEventHandle) CUDA(cudaIpcOpenMemHandle)
CUDA(cudaKernelSetAttributeForDevice) CUDA(cudaLibraryGetGlobal) CUDA(cudaLibraryGetKernel)
CUDA(cudaLibraryGetKernelCount) CUDA(cudaLibraryGetManaged) CUDA(cudaLibraryGetUnifiedFunction)
CUDA(cudaLibraryLoadData) CUDA(cudaLibraryLoadFromFile) CUDA(cudaLibraryUnload)
CUDA(cudaMallocAsync) CUDA(cudaMallocManaged) CUDA(cudaMemPoolGetAttribute)
CUDA(cudaMemPoolSetAccess) CUDA(cudaMemPoolSetAttribute) CUDA(cudaMemPoolTrimTo)
CUDA(cudaMemcpy2DAsync) CUDA(cudaProfilerStart) CUDA(cudaProfilerStop) CUDA(cudaStreamBeginCapture)
CUDA(cudaStreamBeginCaptureToGraph) CUDA(cudaStreamEndCapture)
CUDA(cudaStreamUpdateCaptureDependencies) CUDA(cudaUserObjectCreate) CUDA(cudaUserObjectRelease)

CUBLAS(cublasCdotc_v2) CUBLAS(cublasCdotu_v2) CUBLAS(cublasCgelsBatched)
CUBLAS(cublasCgemmStridedBatched) CUBLAS(cublasCgemm_v2) CUBLAS(cublasCgemv_v2)
CUBLAS(cublasCgeqrfBatched) CUBLAS(cublasCgetrfBatched) CUBLAS(cublasCgetrsBatched)
CUBLAS(cublasCtrsmBatched) CUBLAS(cublasCtrsm_v2) CUBLAS(cublasDgelsBatched)
CUBLAS(cublasDgeqrfBatched) CUBLAS(cublasDgetrfBatched) CUBLAS(cublasDgetrsBatched)
CUBLAS(cublasDtrsmBatched) CUBLAS(cublasDtrsm_v2) CUBLAS(cublasLtMatmulAlgoCheck)
CUBLAS(cublasLtMatmulAlgoConfigGetAttribute) CUBLAS(cublasLtMatmulAlgoConfigSetAttribute)
CUBLAS(cublasLtMatmulAlgoInit) CUBLAS(cublasSetSmCountTarget) CUBLAS(cublasSgelsBatched)
CUBLAS(cublasSgeqrfBatched) CUBLAS(cublasSgetrfBatched) CUBLAS(cublasSgetrsBatched)
CUBLAS(cublasStrsmBatched) CUBLAS(cublasStrsm_v2) CUBLAS(cublasZdotc_v2) CUBLAS(cublasZdotu_v2)
CUBLAS(cublasZgelsBatched) CUBLAS(cublasZgemmStridedBatched) CUBLAS(cublasZgemm_v2)
CUBLAS(cublasZgemv_v2) CUBLAS(cublasZgeqrfBatched) CUBLAS(cublasZgetrfBatched)
CUBLAS(cublasZgetrsBatched) CUBLAS(cublasZtrsmBatched) CUBLAS(cublasZtrsm_v2)

NCCL(ncclCommGetUniqueId) NCCL(ncclCommGrow) NCCL(ncclCommInitAll)
NCCL(ncclCommMemStats) NCCL(ncclCommResume) NCCL(ncclCommRevoke) NCCL(ncclCommShrink)
NCCL(ncclCommSuspend) NCCL(ncclCommWindowDeregister) NCCL(ncclCommWindowRegister)
NCCL(ncclDevCommCreate) NCCL(ncclDevCommDestroy) NCCL(ncclGather)
NCCL(ncclGetLsaMultimemDevicePointer) NCCL(ncclGetPeerDevicePointer) NCCL(ncclGroupSimulateEnd)
NCCL(ncclPutSignal) NCCL(ncclRedOpCreatePreMulSum) NCCL(ncclRedOpDestroy) NCCL(ncclReduce)
NCCL(ncclSignal) NCCL(ncclWaitSignal) NCCL(ncclWinGetUserPtr)
// clang-format on

#undef CUDA
#undef CUBLAS
#undef NCCL
#undef REFUSED
