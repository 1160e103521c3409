#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/export.h"
#include "tessera/kernels/detail/distribution.h"
#include "tessera/kernels/detail/philox.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Which elements of a global tensor a local tensor holds. The random number of an element depends
/// on its row-major index in the global tensor, plus `first_element`.
struct GlobalPlace {
  std::vector<Box> boxes;
  std::vector<std::int64_t> sizes;  ///< global
  std::int64_t first_element = 0;

  /// The place of a plain tensor: all elements.
  static GlobalPlace whole(std::vector<std::int64_t> sizes, std::int64_t first_element = 0);
};

// On CPU and CUDA, with the same bits. Without autograd. Throw Error for types that are not fp64,
// fp32, fp16 or bf16, and on CUDA if libtessera_cuda.so is not loaded.

/// Fills `local`, of any strides. Each value is drawn in fp64 and rounded once.
void fill_random(const at::Tensor& local, const GlobalPlace& place,
                 const Distribution& distribution, PhiloxKey key);
/// x with each element zeroed with probability p, and the others multiplied by 1/(1-p); contiguous.
at::Tensor dropout(const at::Tensor& x, const GlobalPlace& place, double p, PhiloxKey key);

}  // namespace tessera::kernels
TESSERA_API_END
