// aten::embedding and aten::gather where the dimension that they pick from is split: each rank
// picks from its shard, and the sum over ranks is the result. A rule names one of them
// (ShardingRule::LocalCall), and plan_by_rule.cpp runs it instead of the operator. They are
// operators and not functions, since the plan of a call runs operators. Beside the original's
// arguments they take where the shard begins and the size of the whole dimension. An index outside
// of that throws on a CPU. On a GPU embedding_rows asserts that on the device, and gather_part does
// not check it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

/// An index that no shard has must not pass as a row of zeros.
void check_range(const at::Tensor& indices, std::int64_t rows) {
  if (indices.numel() == 0 || indices.is_meta()) {
    return;
  }
  const auto inside = indices.ge(0).logical_and(indices.lt(rows)).all();
  if (indices.is_cpu()) {
    TESSERA_CHECK(inside.item<bool>(), "embedding: an index is outside the ", rows, " rows, from ",
                  indices.min().item<std::int64_t>(), " to ", indices.max().item<std::int64_t>(),
                  "; check the vocabulary");
  } else {
    // No wait for the device: the assertion fails there, later.
    at::_assert_async(inside, "embedding: an index is outside the rows");
  }
}

/// Rows `first`, `first + 1`, ... of `rows` are `weight`; indices of others give zeros.
at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices, std::int64_t first,
                          std::int64_t rows) {
  check_range(indices, rows);
  // A shard without rows: at::embedding has nothing to pick from, not even row 0.
  if (weight.size(0) == 0) {
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    return at::zeros(sizes, weight.options());
  }
  const auto local = indices.sub(first);
  // Row 0 stands in for the rows of other ranks, and its values are wiped out.
  const auto elsewhere = local.lt(0).logical_or_(local.ge(weight.size(0)));
  return at::embedding(weight, local.masked_fill(elsewhere, 0))
      .masked_fill_(elsewhere.unsqueeze(-1), 0);
}

/// Positions `first`, `first + 1`, ... of `size` along `dim` are in `self`; indices of others give
/// zeros.
at::Tensor gather_part(const at::Tensor& self, std::int64_t dim, const at::Tensor& index,
                       std::int64_t first, std::int64_t size) {
  if (index.numel() > 0 && index.is_cpu()) {
    TESSERA_CHECK(index.min().item<std::int64_t>() >= 0 && index.max().item<std::int64_t>() < size,
                  "gather: an index is outside dimension ", dim, " of size ", size);
  }
  if (self.size(dim) == 0) {
    return at::zeros(index.sizes(), self.options());
  }
  const auto local = index.sub(first);
  const auto elsewhere = local.lt(0).logical_or_(local.ge(self.size(dim)));
  return self.gather(dim, local.masked_fill(elsewhere, 0)).masked_fill_(elsewhere, 0);
}

TORCH_LIBRARY(tessera_local, library) {
  library.def("embedding_rows(Tensor weight, Tensor indices, int first, int rows) -> Tensor");
  library.def("gather_part(Tensor self, int dim, Tensor index, int first, int size) -> Tensor");
  // They get local tensors only, with autograd left behind.
  library.impl("embedding_rows",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &embedding_rows));
  library.impl("gather_part",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &gather_part));
}

}  // namespace
}  // namespace tessera::detail
