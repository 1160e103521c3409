// Rotary position embedding, for queries and keys as projections leave them.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "device/rotary.h"
#include "fused_dispatch.h"
#include "parallel.h"
#include "tessera/kernels/fused.h"

namespace tessera::kernels {
namespace {

/// `transposed` is the backward: a rotation by the negative angle, except that cos and sin need not
/// be equal on both halves, so that the sine is applied before the halves are swapped.
at::Tensor composed(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                    bool transposed) {
  const c10::ScalarType type = compute_type(x);
  const at::Tensor v = x.to(type);
  const at::Tensor c = cos.to(type).unsqueeze(1);
  const at::Tensor s = sin.to(type).unsqueeze(1);
  const auto rotate = [](const at::Tensor& t, double sign) {
    const auto halves = t.chunk(2, -1);
    return at::cat({halves[1] * -sign, halves[0] * sign}, -1);
  };
  const at::Tensor across = transposed ? rotate(v * s, -1.0) : rotate(v, 1.0) * s;
  return (v * c + across).to(x.scalar_type());
}

/// Like `composed`, of x with dense heads and of dense tables in fp32.
at::Tensor on_cuda(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                   bool transposed) {
  at::Tensor result = at::empty(x.sizes(), x.options());
  run_cuda_kernel(&CudaKernels::rotary_embedding,
                  {.x = x.const_data_ptr(),
                   .batch_stride = x.stride(0),
                   .position_stride = x.stride(1),
                   .head_stride = x.stride(2),
                   .batch = x.size(0),
                   .sequence = x.size(1),
                   .heads = x.size(2),
                   .half = x.size(3) / 2,
                   .cos = in<float>(cos),
                   .sin = in<float>(sin),
                   .transposed = transposed,
                   .out = result.mutable_data_ptr()},
                  "tessera::rotary_embedding", {x}, {result});
  return result;
}

}  // namespace

at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool transposed) {
  if (!has_row_kernels(x) && !has_cuda_kernels(x)) {
    return composed(x, cos, sin, transposed);
  }
  // Heads and positions may have any stride: slices of a joint projection are taken without a copy.
  const at::Tensor from = x.stride(3) == 1 ? x : x.contiguous();
  const at::Tensor c = cos.to(c10::ScalarType::Float).contiguous();
  const at::Tensor s = sin.to(c10::ScalarType::Float).contiguous();
  if (has_cuda_kernels(x)) {
    return on_cuda(from, c, s, transposed);
  }
  at::Tensor result = at::empty(x.sizes(), x.options());
  const std::int64_t sequence = x.size(1);
  const std::int64_t heads = x.size(2);
  const std::int64_t dim = x.size(3);
  // Positions that are worth a thread: some 16 K elements.
  const std::int64_t grain =
      std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(heads * dim, 1));
  with_row_kernels(x, [&](const auto& kernels, auto element) {
    using T = decltype(element);
    parallel_for(0, x.size(0) * sequence, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        // The same tables for each sample of the batch.
        const std::int64_t position = i % sequence;
        kernels.rotary(in<T>(from) + i / sequence * from.stride(0) + position * from.stride(1),
                       from.stride(2), in<float>(c) + position * dim, in<float>(s) + position * dim,
                       out<T>(result) + i * heads * dim, heads, dim / 2, transposed);
      }
    });
  });
  return result;
}

}  // namespace tessera::kernels
