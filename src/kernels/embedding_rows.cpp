// Looks up rows in this rank's shard of an embedding table. Indices outside of the shard give zeros
// (at::embedding throws), so that an all-reduce gives the whole look-up.
#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <optional>
#include <vector>

#include "device/embedding.h"
#include "fused_dispatch.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

std::vector<std::int64_t> result_sizes(const at::Tensor& indices, std::int64_t dim) {
  std::vector<std::int64_t> sizes = indices.sizes().vec();
  sizes.push_back(dim);
  return sizes;
}

/// Throws Error for an index outside of the table: without this check, every rank would give zeros.
void check_range(const std::int64_t* indices, std::int64_t count, std::int64_t total_rows) {
  for (std::int64_t i = 0; i < count; ++i) {
    TESSERA_CHECK(indices[i] >= 0 && indices[i] < total_rows, "embedding: index ", indices[i],
                  " at position ", i, " is not a row of a table of ", total_rows, " rows");
  }
}

/// Looks up embedding rows with ATen operators, for types and devices without a kernel. Rows of
/// other ranks become zero. A check of the indices would have to wait for the device.
at::Tensor composed(const at::Tensor& weight, const at::Tensor& indices, std::int64_t first_row) {
  const std::int64_t rows = weight.size(0);
  const at::Tensor local = indices.flatten() - first_row;
  const at::Tensor elsewhere = (local < 0).logical_or(local >= rows);
  if (rows == 0) {
    return at::zeros(result_sizes(indices, weight.size(1)), weight.options());
  }
  const at::Tensor found = at::index_select(weight, 0, local.masked_fill(elsewhere, 0));
  return found.masked_fill(elsewhere.unsqueeze(1), 0).view(result_sizes(indices, weight.size(1)));
}

at::Tensor composed_backward(const at::Tensor& grad, const at::Tensor& indices,
                             std::int64_t first_row, std::int64_t rows) {
  const at::Tensor local = indices - first_row;
  const at::Tensor elsewhere = (local < 0).logical_or(local >= rows);
  // The gradients of rows on other ranks are added to an extra last row, which narrow() removes.
  return at::embedding_dense_backward(grad, local.masked_fill(elsewhere, rows), rows + 1, rows,
                                      /*scale_grad_by_freq=*/false)
      .narrow(0, 0, rows)
      .contiguous();
}

at::Tensor on_cuda(const at::Tensor& weight, const at::Tensor& indices, std::int64_t first_row,
                   std::int64_t total_rows) {
  const at::Tensor table = weight.contiguous();
  const at::Tensor flat = indices.contiguous();
  at::Tensor result = at::empty(result_sizes(indices, weight.size(1)), weight.options());
  run_cuda_kernel(Embedding{.table = table.const_data_ptr(),
                            .indices = in<std::int64_t>(flat),
                            .count = flat.numel(),
                            .first_row = first_row,
                            .rows = weight.size(0),
                            .total_rows = total_rows,
                            .size = weight.size(1),
                            .out = result.mutable_data_ptr()},
                  // A memory plan takes the inputs' sizes as the bytes read. The kernel reads only
                  // as many bytes of the table as `result` has, so the input is `result`.
                  "tessera::embedding", {result, flat}, {result});
  return result;
}

at::Tensor backward_on_cuda(const at::Tensor& grad, const at::Tensor& indices,
                            std::int64_t first_row, std::int64_t rows) {
  const at::Tensor terms = grad.contiguous();
  // The sort is stable, so positions with equal indices remain in ascending order.
  const auto [sorted, positions] = at::sort(indices.flatten(), std::optional(true), /*dim=*/0);
  const std::int64_t size = grad.size(-1);
  at::Tensor weight_grad = at::zeros({rows, size}, grad.options());
  const at::Tensor partial = at::empty({embedding_tiles(sorted.numel()), 2, size},
                                       grad.options().dtype(c10::ScalarType::Float));
  if (terms.numel() > 0) {
    run_cuda_kernel(EmbeddingBackward{.grad = terms.const_data_ptr(),
                                      .indices = in<std::int64_t>(sorted),
                                      .positions = in<std::int64_t>(positions),
                                      .count = sorted.numel(),
                                      .first_row = first_row,
                                      .rows = rows,
                                      .size = size,
                                      .weight_grad = weight_grad.mutable_data_ptr(),
                                      .partial = out<float>(partial)},
                    "tessera::embedding_backward", {terms, sorted, positions}, {weight_grad});
  }
  return weight_grad;
}

/// Adds terms[i] to the row indices[i] of `sums`, which must be zeros. Threads divide the columns,
/// so the order of additions is fixed.
template <class T>
void add_terms(const at::Tensor& terms, const std::int64_t* indices, std::int64_t first_row,
               const at::Tensor& sums) {
  const std::int64_t dim = sums.size(1);
  const std::int64_t count = dim == 0 ? 0 : terms.numel() / dim;
  const auto* const from = in<T>(terms);
  auto* const to = out<T>(sums);
  parallel_for(0, dim, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = indices[i] - first_row;
      if (row < 0 || row >= sums.size(0)) {
        continue;
      }
      for (std::int64_t column = begin; column < end; ++column) {
        to[row * dim + column] += from[i * dim + column];
      }
    }
  });
}

}  // namespace

at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices,
                          std::int64_t first_row, std::int64_t total_rows) {
  // For meta tensors only sizes are computed, because libtorch's C++ library has no meta kernels
  // for the operators in this function.
  if (weight.is_meta()) {
    return at::zeros(result_sizes(indices, weight.size(1)), weight.options());
  }
  if (has_cuda_kernels(weight)) {
    return on_cuda(weight, indices, first_row, total_rows);
  }
  if (!weight.is_cpu() || fake_device() != c10::DeviceType::CPU) {
    return composed(weight, indices, first_row);
  }
  const at::Tensor table = weight.contiguous();
  const at::Tensor flat = indices.contiguous();
  at::Tensor result = at::zeros(result_sizes(indices, weight.size(1)), weight.options());
  const auto* rows = static_cast<const std::int64_t*>(flat.const_data_ptr());
  check_range(rows, flat.numel(), total_rows);
  if (result.numel() == 0 || in_fake_mode()) {
    return result;
  }
  const std::size_t bytes = static_cast<std::size_t>(table.size(1)) * table.itemsize();
  const auto* from = static_cast<const char*>(table.const_data_ptr());
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  parallel_for(0, flat.numel(), 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = rows[i] - first_row;
      if (row < 0 || row >= table.size(0)) {
        continue;
      }
      std::memcpy(to + static_cast<std::size_t>(i) * bytes,
                  from + static_cast<std::size_t>(row) * bytes, bytes);
    }
  });
  return result;
}

at::Tensor embedding_rows_backward(const at::Tensor& grad, const at::Tensor& indices,
                                   std::int64_t first_row, std::int64_t rows) {
  if (grad.is_meta()) {
    return at::zeros({rows, grad.size(-1)}, grad.options());
  }
  if (has_cuda_kernels(grad)) {
    return backward_on_cuda(grad, indices, first_row, rows);
  }
  if (!grad.is_cpu() || fake_device() != c10::DeviceType::CPU) {
    return composed_backward(grad, indices, first_row, rows);
  }
  // The gradient's sums are computed in fp32 or fp64, and rounded once.
  const at::Tensor terms = grad.to(compute_type(grad)).contiguous();
  const at::Tensor flat = indices.contiguous();
  const at::Tensor sums = at::zeros({rows, grad.size(-1)}, terms.options());
  if (!in_fake_mode()) {
    const auto add = grad.scalar_type() == at::kDouble ? &add_terms<double> : &add_terms<float>;
    add(terms, in<std::int64_t>(flat), first_row, sums);
  }
  return sums.to(grad.scalar_type());
}

}  // namespace tessera::kernels
