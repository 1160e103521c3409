// Rotary position embedding, for queries and keys as projections leave them: apart, or in one
// product with values.
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

/// Tensors that one pass reads and writes: (batch, sequence, heads, head_dim), or with groups
/// before the heads.
struct Heads {
  at::Tensor x;
  at::Tensor out;
  bool turned = true;
};

HeadStrides strides_of(const at::Tensor& x) {
  return {.batch = x.stride(0),
          .position = x.stride(1),
          .group = x.dim() == 5 ? x.stride(2) : 0,
          .head = x.stride(-2)};
}

RotaryHeads part_of(const Heads& each) {
  return {.x = each.x.const_data_ptr(),
          .out = each.out.mutable_data_ptr(),
          .from = strides_of(each.x),
          .to = strides_of(each.out),
          .groups = each.x.dim() == 5 ? each.x.size(2) : 1,
          .heads = each.x.size(-2),
          .turned = each.turned};
}

std::int64_t offset_of(const HeadStrides& strides, std::int64_t sample, std::int64_t place,
                       std::int64_t group) {
  return sample * strides.batch + place * strides.position + group * strides.group;
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
  const std::int64_t at_once = part.turned && part.to.head == 2 * p.half ? part.heads : 1;
  for (std::int64_t group = 0; group < part.groups; ++group) {
    const T* x = static_cast<const T*>(part.x) + offset_of(part.from, sample, place, group);
    T* out = static_cast<T*>(part.out) + offset_of(part.to, sample, place, group);
    for (std::int64_t head = 0; head < part.heads; head += at_once) {
      const T* from = x + head * part.from.head;
      T* to = out + head * part.to.head;
      if (part.turned) {
        kernels.rotary(from, part.from.head, p.cos + table, p.sin + table, to, at_once, p.half,
                       p.transposed);
      } else {
        std::copy_n(from, 2 * p.half, to);
      }
    }
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

/// Queries, keys and values of a product (batch, sequence, groups, n + 2, head_dim), as views.
struct GroupedHeads {
  explicit GroupedHeads(const at::Tensor& qkv)
      : q(qkv.narrow(3, 0, qkv.size(3) - 2)),
        k(qkv.select(3, qkv.size(3) - 2)),
        v(qkv.select(3, qkv.size(3) - 1)) {}
  at::Tensor q, k, v;
};

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

std::tuple<at::Tensor, at::Tensor, at::Tensor> rotary_qkv(const at::Tensor& qkv,
                                                          const at::Tensor& cos,
                                                          const at::Tensor& sin) {
  const GroupedHeads from(with_dense_heads(qkv));
  if (!has_kernels(qkv)) {
    const at::Tensor q = composed(from.q.flatten(2, 3), cos, sin, /*transposed=*/false);
    return {q.view(from.q.sizes()), composed(from.k, cos, sin, /*transposed=*/false),
            from.v.clone(at::MemoryFormat::Contiguous)};
  }
  const at::Tensor q = dense_like(from.q);
  const at::Tensor k = dense_like(from.k);
  const at::Tensor v = dense_like(from.v);
  run({{from.q, q}, {from.k, k}, {from.v, v, /*turned=*/false}}, {cos, sin, /*transposed=*/false},
      "tessera::rotary_qkv", {qkv}, {q, k, v});
  return {q, k, v};
}

at::Tensor rotary_qkv_backward(const at::Tensor& q_grad, const at::Tensor& k_grad,
                               const at::Tensor& v_grad, const at::Tensor& cos,
                               const at::Tensor& sin) {
  std::vector<std::int64_t> sizes = q_grad.sizes().vec();
  sizes[3] += 2;
  at::Tensor result = at::empty(sizes, q_grad.options());
  const GroupedHeads to(result);
  if (!has_kernels(q_grad)) {
    to.q.copy_(composed(q_grad.flatten(2, 3), cos, sin, /*transposed=*/true).view(to.q.sizes()));
    to.k.copy_(composed(k_grad, cos, sin, /*transposed=*/true));
    to.v.copy_(v_grad);
    return result;
  }
  run({{with_dense_heads(q_grad), to.q},
       {with_dense_heads(k_grad), to.k},
       {with_dense_heads(v_grad), to.v, /*turned=*/false}},
      {cos, sin, /*transposed=*/true}, "tessera::rotary_qkv_backward", {q_grad, k_grad, v_grad},
      {result});
  return result;
}

}  // namespace tessera::kernels
