// Composite operators that write to their `out` through what is no view to the dispatcher
// (_unsafe_view, set_): into a distributed tensor their result is copied.

#include <ATen/core/Tensor.h>

#include <ATen/ops/kron.h>
#include <ATen/ops/kron_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/matmul_compositeimplicitautograd_dispatch.h>

#include "override_composite.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::detail {
namespace {

at::Tensor& copy_to(at::Tensor& out, const at::Tensor& result, const char* name) {
  TESSERA_CHECK(out.sizes() == result.sizes(), name, " would resize a distributed tensor of sizes ",
                out.sizes(), " to ", result.sizes(), ": pass one of the result's sizes");
  return out.copy_(result);
}

at::Tensor& kron_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  if (!tessera::is_distributed(out)) {
    return at::compositeimplicitautograd::kron_out(out, self, other);
  }
  return copy_to(out, at::kron(self, other), "aten::kron.out");
}

at::Tensor& matmul_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  if (!tessera::is_distributed(out)) {
    return at::compositeimplicitautograd::matmul_out(out, self, other);
  }
  return copy_to(out, at::matmul(self, other), "aten::matmul.out");
}

void implement_out_variants(torch::Library& library) {
  library.impl("kron.out", &kron_out);
  library.impl("matmul.out", &matmul_out);
}

TESSERA_OVERRIDE_COMPOSITE(implement_out_variants)

}  // namespace
}  // namespace tessera::detail
