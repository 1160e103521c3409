// What aten::embedding becomes on a shard of the vocabulary.

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
  if (indices.numel() == 0 || indices.is_meta()) return;
  const auto inside = indices.ge(0).logical_and(indices.lt(rows)).all();
  if (indices.is_cpu()) {
    TESSERA_CHECK(inside.item<bool>(), "embedding: an index is outside the ", rows, " rows, from ",
                  indices.min().item<std::int64_t>(), " to ", indices.max().item<std::int64_t>(),
                  "; check the vocabulary");
  } else {
    at::_assert_async(inside, "embedding: an index is outside the rows");
  }
}

/// Rows `first`, `first + 1`, ... of `rows` are `weight`; indices of others give zeros.
at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices, std::int64_t first,
                          std::int64_t rows) {
  check_range(indices, rows);
  if (weight.size(0) == 0) {
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    return at::zeros(sizes, weight.options());
  }
  const auto local = indices.sub(first);
  const auto elsewhere = local.lt(0).logical_or_(local.ge(weight.size(0)));
  return at::embedding(weight, local.masked_fill(elsewhere, 0))
      .masked_fill_(elsewhere.unsqueeze(-1), 0);
}

TORCH_LIBRARY(tessera_local, library) {
  library.def("embedding_rows(Tensor weight, Tensor indices, int first, int rows) -> Tensor");
  library.impl("embedding_rows",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &embedding_rows));
}

}  // namespace
}  // namespace tessera::detail
