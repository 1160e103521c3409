// Functions that launch the kernels of this folder on a stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "device/adamw.h"
#include "device/cross_entropy.h"
#include "device/embedding.h"
#include "device/norm.h"
#include "device/pack.h"
#include "device/quantize_fp8.h"
#include "device/rms_norm.h"
#include "device/rotary.h"
#include "device/silu_mul.h"

namespace tessera::kernels {

void launch(const CrossEntropy& call, Element type, cudaStream_t stream);
void launch(const CrossEntropyBackward& call, Element type, cudaStream_t stream);
void launch(const Scale& call, Element type, cudaStream_t stream);
void launch(const Embedding& call, Element type, cudaStream_t stream);
/// Launches two kernels.
void launch(const EmbeddingBackward& call, Element type, cudaStream_t stream);
void launch(const CheckIndices& call, cudaStream_t stream);
void launch(const RmsNorm& call, Element type, cudaStream_t stream);
/// Launches two kernels if the weight's gradient is needed.
void launch(const RmsNormBackward& call, Element type, cudaStream_t stream);
void launch(const Rotary& call, Element type, cudaStream_t stream);
void launch(const SiluMul& call, Element type, cudaStream_t stream);
void launch(const SiluMulBackward& call, Element type, cudaStream_t stream);
void launch(const Pack& call, Element from, cudaStream_t stream);
void launch(const AdamW& call, Element moments, cudaStream_t stream);
void launch(const SquareSums& call, Element type, cudaStream_t stream);
void launch(const SumKinds& call, cudaStream_t stream);
void launch(const ClipNorm& call, cudaStream_t stream);
void launch(const QuantizeFp8& call, Element type, cudaStream_t stream);

}  // namespace tessera::kernels
