// use_fast_products() makes large fp32 matrix products use oneDNN instead of MKL. On some
// processors MKL uses half of the vector width, and oneDNN is twice as fast.
#include "rows/row_kernels.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>

#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/kernels/products.h"

namespace tessera::kernels {
namespace {

using tessera::detail::has_onednn;
using tessera::detail::onednn_product;
namespace libtorch = tessera::detail::libtorch_cpu;

/// Whether MKL does not use the widest vectors of this processor: MKL has AVX-512 kernels only for
/// Intel processors, and uses AVX2 on AMD processors.
bool mkl_leaves_vectors_unused() {
#ifdef __x86_64__
  return __builtin_cpu_is("amd") != 0 && has_avx512();
#else
  return false;
#endif
}

/// Whether oneDNN beats MKL for a product (rows, inner) x (inner, columns). oneDNN loses in small
/// products by its kernel look-up, and in narrow products, which are limited by memory.
bool gains_from_onednn(std::int64_t rows, std::int64_t inner, std::int64_t columns) {
  constexpr std::int64_t kMostMultiplications = 2'000'000;
  constexpr std::int64_t kShortSide = 7;
  return std::min({rows, inner, columns}) > kShortSide &&
         rows * inner * columns > kMostMultiplications;
}

bool is_dense_fp32(const at::Tensor& matrix) {
  if (matrix.dim() != 2 || matrix.scalar_type() != c10::ScalarType::Float) {
    return false;
  }
  const auto sizes = matrix.sizes();
  const auto strides = matrix.strides();
  return (strides[1] == 1 && strides[0] == sizes[1]) || (strides[0] == 1 && strides[1] == sizes[0]);
}

bool takes_onednn(const at::Tensor& a, const at::Tensor& b) {
  return is_dense_fp32(a) && is_dense_fp32(b) && a.size(1) == b.size(0) &&
         gains_from_onednn(a.size(0), a.size(1), b.size(1)) && has_onednn();
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  if (!takes_onednn(a, b)) {
    return libtorch::mm(a, b);
  }
  at::Tensor result = at::empty({a.size(0), b.size(1)}, a.options());
  onednn_product(a, b, result, /*beta=*/0, /*alpha=*/1);
  return result;
}

at::Tensor& add_product(at::Tensor& result, const at::Tensor& a, const at::Tensor& b,
                        const at::Scalar& beta, const at::Scalar& alpha) {
  if (!takes_onednn(a, b) || result.scalar_type() != c10::ScalarType::Float ||
      !result.is_contiguous() || result.sizes() != at::IntArrayRef{a.size(0), b.size(1)}) {
    return libtorch::addmm_(result, a, b, beta, alpha);
  }
  onednn_product(a, b, result, beta.toFloat(), alpha.toFloat());
  return result;
}

at::Tensor addmm(const at::Tensor& term, const at::Tensor& a, const at::Tensor& b,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  if (!takes_onednn(a, b) || term.scalar_type() != c10::ScalarType::Float) {
    return libtorch::addmm(term, a, b, beta, alpha);
  }
  at::Tensor result = term.expand({a.size(0), b.size(1)}).clone(at::MemoryFormat::Contiguous);
  return add_product(result, a, b, beta, alpha);
}

class Silent final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

void use_fast_products() {
  if (!mkl_leaves_vectors_unused() || !has_onednn()) {
    return;
  }
  static const auto* const library = [] {
    // Silences libtorch's warning that this kernel replaces libtorch's kernel of matrix products.
    Silent silent;
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    auto* made =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    made->impl("mm", &mm);
    made->impl("addmm", &addmm);
    made->impl("addmm_", &add_product);
    return made;
  }();
  static_cast<void>(library);
}

}  // namespace tessera::kernels
