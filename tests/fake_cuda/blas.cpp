// A fake of cuBLAS and cuBLASLt. The fake counts matrix products by sizes and computes nothing.
#include <cublasLt.h>
#include <cublas_v2.h>

#include <mutex>
#include <sstream>
#include <string>

#include "record/record.h"
#include "runtime/runtime.h"

namespace fake_cuda {
namespace {

/// The object behind cublasHandle_t.
struct Blas {
  cudaStream_t stream = nullptr;
  cublasMath_t math_mode = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
};

Blas& blas(cublasHandle_t handle) {
  return *reinterpret_cast<Blas*>(handle);
}

const char* name_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_32F:
      return "fp32";
    case CUDA_R_64F:
      return "fp64";
    case CUDA_R_16F:
      return "fp16";
    case CUDA_R_16BF:
      return "bf16";
    default:
      return "other type";
  }
}

cublasStatus_t count(cudaStream_t handle, const std::string& product) {
  const Stream* const stream = find_stream(handle);
  if (stream == nullptr) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  const std::lock_guard lock(record().mutex);
  ++record().gemms[product];
  ++record().streams[stream->id()].launches;
  return CUBLAS_STATUS_SUCCESS;
}

/// Counts a matrix product by its transposes, sizes m x n x k and dtype: "NT 64x128x32 bf16".
cublasStatus_t count_gemm(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m,
                          int n, int k, cudaDataType type, int batch = 1) {
  std::ostringstream product;
  product << (a == CUBLAS_OP_N ? 'N' : 'T') << (b == CUBLAS_OP_N ? 'N' : 'T') << ' ' << m << 'x'
          << n << 'x' << k << ' ' << name_of(type);
  if (batch > 1) {
    product << ", " << batch << " in a batch";
  }
  return count(blas(handle).stream, product.str());
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = reinterpret_cast<cublasHandle_t>(new Blas);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete &blas(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  blas(handle).stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, std::size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  blas(handle).math_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = blas(handle).math_mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  blas(handle).pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = blas(handle).pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m,
                            int n, int k, const void*, const void*, cudaDataType type, int,
                            const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                            cublasComputeType_t, cublasGemmAlgo_t) {
  return count_gemm(handle, a, b, m, n, k, type);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t a,
                                          cublasOperation_t b, int m, int n, int k, const void*,
                                          const void*, cudaDataType type, int, long long,
                                          const void*, cudaDataType, int, long long, const void*,
                                          void*, cudaDataType, int, long long, int batch,
                                          cublasComputeType_t, cublasGemmAlgo_t) {
  return count_gemm(handle, a, b, m, n, k, type, batch);
}

cublasStatus_t cublasSgemmEx(cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m,
                             int n, int k, const float*, const void*, cudaDataType type, int,
                             const void*, cudaDataType, int, const float*, void*, cudaDataType,
                             int) {
  return count_gemm(handle, a, b, m, n, k, type);
}

// Defines the cuBLAS functions whose names contain a type letter: S (float) or D (double).
#define FAKE_BLAS(NAME, T, TYPE)                                                                  \
  cublasStatus_t cublas##NAME##gemm_v2(cublasHandle_t handle, cublasOperation_t a,                \
                                       cublasOperation_t b, int m, int n, int k, const T*,        \
                                       const T*, int, const T*, int, const T*, T*, int) {         \
    return count_gemm(handle, a, b, m, n, k, TYPE);                                               \
  }                                                                                               \
  cublasStatus_t cublas##NAME##gemmStridedBatched(                                                \
      cublasHandle_t handle, cublasOperation_t a, cublasOperation_t b, int m, int n, int k,       \
      const T*, const T*, int, long long, const T*, int, long long, const T*, T*, int, long long, \
      int batch) {                                                                                \
    return count_gemm(handle, a, b, m, n, k, TYPE, batch);                                        \
  }                                                                                               \
  cublasStatus_t cublas##NAME##gemv_v2(cublasHandle_t handle, cublasOperation_t a, int m, int n,  \
                                       const T*, const T*, int, const T*, int, const T*, T*,      \
                                       int) {                                                     \
    return count_gemm(handle, a, CUBLAS_OP_N, m, 1, n, TYPE);                                     \
  }                                                                                               \
  cublasStatus_t cublas##NAME##dot_v2(cublasHandle_t handle, int n, const T*, int, const T*, int, \
                                      T*) {                                                       \
    return count_gemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, n, TYPE);                           \
  }
FAKE_BLAS(S, float, CUDA_R_32F)
FAKE_BLAS(D, double, CUDA_R_64F)
#undef FAKE_BLAS

cublasStatus_t cublasDotEx(cublasHandle_t handle, int n, const void*, cudaDataType type, int,
                           const void*, cudaDataType, int, void*, cudaDataType, cudaDataType) {
  return count_gemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, n, type);
}

std::size_t cublasLtGetVersion() {
  return CUBLAS_VERSION;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t,
                                        cudaDataType) {
  *out = new cublasLtMatmulDescOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor) {
  delete descriptor;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
                                              const void*, std::size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  *out = new cublasLtMatmulPreferenceOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, std::size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t columns, std::int64_t) {
  *out = new cublasLtMatrixLayoutOpaque_t{{static_cast<std::uint64_t>(type), rows, columns}};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t,
                                                cublasLtMatrixLayoutAttribute_t, const void*,
                                                std::size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* count) {
  *results = {};
  results->state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                              cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t,
                              const void*, const void*, cublasLtMatrixLayout_t, void*,
                              cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t*, void*,
                              std::size_t, cudaStream_t stream) {
  std::ostringstream product;
  product << "Lt " << d->data[1] << 'x' << d->data[2] << " from " << a->data[1] << 'x' << a->data[2]
          << ' ' << name_of(static_cast<cudaDataType>(a->data[0]));
  return count(stream, product.str());
}

}  // extern "C"
