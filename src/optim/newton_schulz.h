#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace tessera::optim {

/// Approximately the orthogonal matrix nearest to `matrix` (U V^T of its singular value
/// decomposition, with singular values of about 0.7 to 1.2), by a quintic Newton-Schulz iteration
/// in the matrix's type: (rows, columns), plain. As torch.optim.Muon computes it, after Keller
/// Jordan. Zeros for zeros.
at::Tensor newton_schulz(const at::Tensor& matrix, const std::array<double, 3>& coefficients,
                         int steps, double eps);

}  // namespace tessera::optim
