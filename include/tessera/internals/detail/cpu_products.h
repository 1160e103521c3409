// Products of matrices on a CPU, past the dispatcher: as libtorch computes them, for a kernel that
// stands before them; and of fp32 by oneDNN, which libtorch takes only where its user lets fp32 be
// computed in fewer bits. Of oneDNN's products those with a name (mkldnn::_linear_pointwise)
// neither add to their result nor write where they are told. The function behind libtorch's own is
// exported, and in no header.
//
// No version differs.
//
// Canary: CpuProductsCanary.
#pragma once

#include <ATen/core/Tensor.h>

#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

namespace libtorch_cpu = at::cpu;

/// Whether this libtorch has oneDNN and its user lets it be used (torch.backends.mkldnn).
bool has_onednn();

/// result = beta * result + alpha * a b, of fp32 matrices. `a` and `b` are contiguous or the
/// transpose of a contiguous matrix; `result` is contiguous and shares memory with neither.
void onednn_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, float beta,
                    float alpha);

}  // namespace tessera::detail
TESSERA_API_END
