#include "tessera/internals/detail/cpu_products.h"

#include <ATen/Context.h>

namespace at::native {

void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result, float beta, float alpha);

}  // namespace at::native

namespace tessera::detail {

bool has_onednn() {
  return at::Context::hasMKLDNN() && at::globalContext().userEnabledMkldnn();
}

void onednn_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, float beta,
                    float alpha) {
  at::native::mkldnn_matmul(a, b, result, beta, alpha);
}

}  // namespace tessera::detail
