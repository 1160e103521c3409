#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/core/detail/layout_math.h"
#include "tessera/export.h"
#include "tessera/kernels/detail/distribution.h"
#include "tessera/kernels/detail/philox.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Describes which elements of a global tensor a local tensor contains. An element's random number
/// depends on `first_element` plus its row-major index in the global tensor.
struct GlobalPlace {
  std::vector<Box> boxes;
  std::vector<std::int64_t> sizes;  ///< sizes of the global tensor
  std::int64_t first_element = 0;

  /// The place of a plain tensor, which contains all elements.
  static GlobalPlace whole(std::vector<std::int64_t> sizes, std::int64_t first_element = 0);
};

// Random fills, with the same bits on CPU and CUDA, not recorded by autograd. The functions throw
// Error for types other than fp64, fp32, fp16 and bf16, and on CUDA if libtessera_cuda.so is not
// loaded.

/// Fills `local`, which may have any strides. Each value is drawn in fp64 and rounded once.
void fill_random(const at::Tensor& local, const GlobalPlace& place,
                 const Distribution& distribution, PhiloxKey key);
/// Returns x after dropout: each element is set to zero with probability p, and otherwise
/// multiplied by 1/(1-p). The result is contiguous.
at::Tensor dropout(const at::Tensor& x, const GlobalPlace& place, double p, PhiloxKey key);

}  // namespace tessera::kernels
TESSERA_API_END
