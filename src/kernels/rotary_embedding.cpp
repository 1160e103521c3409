// Rotary position embedding of queries and keys.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

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

/// Tensors that one pass reads and writes: (batch, sequence, heads, head_dim).
struct Heads {
  at::Tensor x;
  at::Tensor out;
};

HeadStrides strides_of(const at::Tensor& x) {
  return {.batch = x.stride(0), .position = x.stride(1), .head = x.stride(-2)};
}

RotaryHeads part_of(const Heads& each) {
  return {.x = each.x.const_data_ptr(),
          .out = each.out.mutable_data_ptr(),
          .from = strides_of(each.x),
          .to = strides_of(each.out),
          .heads = each.x.size(-2)};
}

std::int64_t offset_of(const HeadStrides& strides, std::int64_t sample, std::int64_t place) {
  return sample * strides.batch + place * strides.position;
}

/// The heads of a part, of one position.
template <class T>
void turn_position(const RowKernels<T>& kernels, const Rotary& p, const RotaryHeads& part,
                   std::int64_t position) {
  const std::int64_t sample = position / p.sequence;
  const std::int64_t place = position % p.sequence;
  // The same tables for each sample of the batch.
  const std::int64_t table = place * 2 * p.half;
  // A kernel's heads are dense in `out`.
  const std::int64_t at_once = part.to.head == 2 * p.half ? part.heads : 1;
  const T* x = static_cast<const T*>(part.x) + offset_of(part.from, sample, place);
  T* out = static_cast<T*>(part.out) + offset_of(part.to, sample, place);
  for (std::int64_t head = 0; head < part.heads; head += at_once) {
    kernels.rotary(x + head * part.from.head, part.from.head, p.cos + table, p.sin + table,
                   out + head * part.to.head, at_once, p.half, p.transposed);
  }
}

template <class T>
void on_host(const RowKernels<T>& kernels, const Rotary& p) {
  // Positions that are worth a thread: some 16 K elements.
  const std::int64_t elements = heads_of_position(p) * 2 * p.half;
  const std::int64_t grain = std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(elements, 1));
  parallel_for(0, p.batch * p.sequence, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t position = begin; position < end; ++position) {
      for (const RotaryHeads& part : p.parts) {
        turn_position(kernels, p, part, position);
      }
    }
  });
}

struct Tables {
  const at::Tensor& cos;
  const at::Tensor& sin;
  bool transposed;
};

/// Fills the tensors' `out`. `inputs` and `results` are those of operator `name`.
void run(std::initializer_list<Heads> tensors, const Tables& tables, const char* name,
         std::initializer_list<at::Tensor> inputs, std::initializer_list<at::Tensor> results) {
  const at::Tensor c = tables.cos.to(c10::ScalarType::Float).contiguous();
  const at::Tensor s = tables.sin.to(c10::ScalarType::Float).contiguous();
  const at::Tensor& first = tensors.begin()->x;
  Rotary call{.batch = first.size(0),
              .sequence = first.size(1),
              .half = first.size(-1) / 2,
              .cos = in<float>(c),
              .sin = in<float>(s),
              .transposed = tables.transposed};
  std::ranges::transform(tensors, std::begin(call.parts), part_of);
  if (has_cuda_kernels(first)) {
    return run_cuda_kernel(call, name, inputs, results);
  }
  with_row_kernels(first, [&](const auto& kernels, auto) { on_host(kernels, call); });
}

/// Heads and positions may have any stride: parts of a joint projection are taken without a copy.
at::Tensor with_dense_heads(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

at::Tensor dense_like(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

}  // namespace

at::Tensor rotary_embedding(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool transposed) {
  if (!has_kernels(x)) {
    return composed(x, cos, sin, transposed);
  }
  at::Tensor result = dense_like(x);
  run({{with_dense_heads(x), result}}, {cos, sin, transposed}, "tessera::rotary_embedding", {x},
      {result});
  return result;
}

std::pair<at::Tensor, at::Tensor> rotary_embedding_qk(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& cos, const at::Tensor& sin,
                                                      bool transposed) {
  if (!has_kernels(q)) {
    return {composed(q, cos, sin, transposed), composed(k, cos, sin, transposed)};
  }
  const at::Tensor q_out = dense_like(q);
  const at::Tensor k_out = dense_like(k);
  run({{with_dense_heads(q), q_out}, {with_dense_heads(k), k_out}}, {cos, sin, transposed},
      "tessera::rotary_embedding_qk", {q, k}, {q_out, k_out});
  return {q_out, k_out};
}

}  // namespace tessera::kernels
