#include "newton_schulz.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/norm.h>

namespace tessera::optim {

at::Tensor newton_schulz(const at::Tensor& matrix, const std::array<double, 3>& coefficients,
                         int steps, double eps) {
  const auto [a, b, c] = coefficients;
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;
  // The spectral norm is at most 1 then.
  x = x.div(x.norm().clamp_min(eps));
  for (int i = 0; i < steps; ++i) {
    const at::Tensor gram = at::mm(x, x.t());
    const at::Tensor update = at::addmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    x = at::addmm(x, update, x, /*beta=*/a);
  }
  return tall ? x.t() : x;
}

}  // namespace tessera::optim
