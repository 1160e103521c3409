#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/kernels/distribution.h"

namespace tessera::kernels {

/// Which elements of a global tensor a local tensor holds. The random number of an element is a
/// function of its row-major index in the global tensor, plus `first_element`.
struct GlobalPlace {
  std::vector<Box> boxes;
  std::vector<std::int64_t> sizes;
  std::int64_t first_element = 0;

  /// All of a tensor.
  static GlobalPlace whole(std::vector<std::int64_t> sizes, std::int64_t first_element = 0);
};

struct PhiloxKey {
  std::uint64_t seed;
  std::uint64_t stream;
};

/// Fills `local` (fp64, fp32, fp16 or bf16, any strides), each value drawn in fp64 and rounded
/// once.
void fill_random(const at::Tensor& local, const GlobalPlace& place,
                 const Distribution& distribution, PhiloxKey key);
/// x with each element zeroed with probability p, and the others multiplied by 1/(1-p).
at::Tensor dropout(const at::Tensor& x, const GlobalPlace& place, double p, PhiloxKey key);

}  // namespace tessera::kernels
