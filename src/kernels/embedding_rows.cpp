// Look-up in a shard of an embedding table whose vocabulary is sharded. at::embedding throws for
// indices outside of the shard; this operator gives zeros for such indices, so that an all-reduce
// over the ranks gives the whole look-up.
#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "device/embedding.h"
#include "float_types.h"
#include "fused_dispatch.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/kernels/detail/fused.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

/// The sizes of the result, with one vector for each index: (..., dim).
std::vector<std::int64_t> result_sizes(const at::Tensor& indices, std::int64_t dim) {
  std::vector<std::int64_t> sizes = indices.sizes().vec();
  sizes.push_back(dim);
  return sizes;
}

/// Checks indices against the whole table, because an index that no rank has would give zeros on
/// all ranks.
void check_range(const std::int64_t* indices, std::int64_t count, std::int64_t total_rows) {
  for (std::int64_t i = 0; i < count; ++i) {
    TESSERA_CHECK(indices[i] >= 0 && indices[i] < total_rows, "embedding: index ", indices[i],
                  " at position ", i, " is not a row of a table of ", total_rows, " rows");
  }
}

/// Look-up by ATen operators, for types and devices without a kernel. Indices of other shards' rows
/// look up row 0, and their results are zeroed afterwards. Indices are not checked, because the CPU
/// would have to wait for the device.
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
  // The table gets one additional row, which receives the indices of other shards' rows and is
  // dropped afterwards.
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
                  // `result` is passed in place of the table as an input, because the kernel reads
                  // as many bytes of the table as it writes.
                  "tessera::embedding", {result, flat}, {result});
  return result;
}

at::Tensor backward_on_cuda(const at::Tensor& grad, const at::Tensor& indices,
                            std::int64_t first_row, std::int64_t rows) {
  const at::Tensor terms = grad.contiguous();
  // The sort is stable, so that equal indices stay in the order of their positions.
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

/// The positions in `indices` of this shard's rows, sorted by row and then by position. One thread
/// then sums each row in a fixed order, so no atomic additions are needed and the bits are the same
/// each time.
std::vector<std::int64_t> positions_by_row(const std::int64_t* indices, std::int64_t count,
                                           std::int64_t first_row, std::int64_t rows) {
  std::vector<std::int64_t> positions;
  positions.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    if (indices[i] >= first_row && indices[i] < first_row + rows) {
      positions.push_back(i);
    }
  }
  std::stable_sort(positions.begin(), positions.end(),
                   [&](std::int64_t a, std::int64_t b) { return indices[a] < indices[b]; });
  return positions;
}

/// For each row that occurs, the index of its first entry in `positions`, which is sorted by row.
/// The last element is the size of `positions`.
std::vector<std::size_t> run_starts(const std::int64_t* indices,
                                    const std::vector<std::int64_t>& positions) {
  std::vector<std::size_t> starts;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (i == 0 || indices[positions[i]] != indices[positions[i - 1]]) {
      starts.push_back(i);
    }
  }
  starts.push_back(positions.size());
  return starts;
}

/// Computes the gradient of the shard's rows. `weight_grad` must contain zeros.
struct Backward {
  const at::Tensor& grad;
  const at::Tensor& weight_grad;
  const std::int64_t* indices;
  std::int64_t first_row;

  /// Adds the terms of type T in the type Compute, and rounds each sum once.
  template <class T, class Compute>
  void run() const {
    const std::int64_t dim = weight_grad.size(1);
    const auto positions = positions_by_row(indices, grad.numel() / std::max<std::int64_t>(dim, 1),
                                            first_row, weight_grad.size(0));
    const auto starts = run_starts(indices, positions);
    const auto* from = in<T>(grad);
    auto* to = out<T>(weight_grad);
    // Threads divide the rows. The terms of a frequent row are not divided among threads. Rows that
    // do not occur stay zero.
    parallel_for(0, static_cast<std::int64_t>(starts.size()) - 1, 8,
                 [&](std::int64_t begin, std::int64_t end) {
                   // The sums of a row, in a wider type, so that only the result is rounded. A task
                   // uses one buffer for all its rows.
                   std::vector<Compute> sum(static_cast<std::size_t>(dim));
                   for (auto row = static_cast<std::size_t>(begin);
                        row < static_cast<std::size_t>(end); ++row) {
                     std::fill(sum.begin(), sum.end(), Compute(0));
                     for (std::size_t i = starts[row]; i < starts[row + 1]; ++i) {
                       const T* const term = from + positions[i] * dim;
                       std::transform(sum.begin(), sum.end(), term, sum.begin(),
                                      [](Compute a, T b) { return a + static_cast<Compute>(b); });
                     }
                     std::transform(sum.begin(), sum.end(),
                                    to + (indices[positions[starts[row]]] - first_row) * dim,
                                    [](Compute each) { return static_cast<T>(each); });
                   }
                 });
  }
};

}  // namespace

at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices,
                          std::int64_t first_row, std::int64_t total_rows) {
  // For meta tensors only sizes are computed, because libtorch's C++ library has no meta kernels
  // for the operators used here.
  if (weight.is_meta()) {
    return at::zeros(result_sizes(indices, weight.size(1)), weight.options());
  }
  if (has_cuda_kernels(weight)) {
    return on_cuda(weight, indices, first_row, total_rows);
  }
  if (!weight.is_cpu() || fake_device() != c10::DeviceType::CPU) {
    return composed(weight, indices, first_row);
  }
  // Rows are copied as bytes, so the type does not matter.
  const at::Tensor table = weight.contiguous();
  const at::Tensor flat = indices.contiguous();
  at::Tensor result = at::zeros(result_sizes(indices, weight.size(1)), weight.options());
  const auto* rows = static_cast<const std::int64_t*>(flat.const_data_ptr());
  check_range(rows, flat.numel(), total_rows);
  // Nothing is copied for an empty shard, which has no address.
  if (result.numel() == 0 || in_fake_mode()) {
    return result;
  }
  const std::size_t bytes = static_cast<std::size_t>(table.size(1)) * table.itemsize();
  const auto* from = static_cast<const char*>(table.const_data_ptr());
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  parallel_for(0, flat.numel(), 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = rows[i] - first_row;
      // Skips a row of another rank, for which the result is already zero.
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
  const at::Tensor terms = grad.contiguous();
  const at::Tensor flat = indices.contiguous();
  at::Tensor weight_grad = at::zeros({rows, grad.size(-1)}, grad.options());
  const Backward backward{terms, weight_grad, in<std::int64_t>(flat), first_row};
  if (!in_fake_mode()) {
    with_float_type(grad.scalar_type(), "the gradient of an embedding", [&]<class T>() {
      backward.run<T, std::conditional_t<std::is_same_v<T, double>, double, float>>();
    });
  }
  return weight_grad;
}

}  // namespace tessera::kernels
