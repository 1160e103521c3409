// What aten::gather becomes where the dimension that it picks along is split.

#include <ATen/core/Tensor.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

/// Positions `first`, `first + 1`, ... of `size` along `dim` are in `self`; indices of others give
/// zeros.
at::Tensor gather_part(const at::Tensor& self, std::int64_t dim, const at::Tensor& index,
                       std::int64_t first, std::int64_t size) {
  if (index.numel() > 0 && index.is_cpu()) {
    TESSERA_CHECK(index.min().item<std::int64_t>() >= 0 && index.max().item<std::int64_t>() < size,
                  "gather: an index is outside dimension ", dim, " of size ", size);
  }
  if (self.size(dim) == 0) return at::zeros(index.sizes(), self.options());
  const auto local = index.sub(first);
  const auto elsewhere = local.lt(0).logical_or_(local.ge(self.size(dim)));
  return self.gather(dim, local.masked_fill(elsewhere, 0)).masked_fill_(elsewhere, 0);
}

TORCH_LIBRARY_FRAGMENT(tessera_local, library) {
  library.def("gather_part(Tensor self, int dim, Tensor index, int first, int size) -> Tensor");
  library.impl("gather_part",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &gather_part));
}

}  // namespace
}  // namespace tessera::detail
