#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

#include "device/rms_norm.h"
#include "device/rotary.h"
#include "device/silu_mul.h"
#include "fused_dispatch.h"
#include "tessera/kernels/detail/fused.h"

namespace tessera::kernels {

// Forward and backward of RMSNorm of a tensor, or of the sum of two tensors, with fp32 statistics.

namespace {

// The number of blocks in which RMSNorm sums the weight's gradient. A constant, so that the
// gradient has the same bits for any number of threads.
constexpr std::int64_t kBlocks = 16;

struct Rows {
  explicit Rows(const at::Tensor& x)
      : dim(x.size(-1)),
        count(dim == 0 ? 0 : x.numel() / dim),
        grain(std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(dim, 1))) {}
  std::int64_t dim;
  std::int64_t count;
  std::int64_t grain;
};

/// Returns the address of an element of `tensor`. Returns nullptr for an undefined tensor: the
/// kernels then use ones (weight) or zeros.
template <class T>
const T* pointer(const at::Tensor& tensor, std::int64_t element = 0) {
  return tensor.defined() ? in<T>(tensor) + element : nullptr;
}

/// Returns a contiguous tensor with the type of `like`. Under autocast the type of a gradient can
/// differ from the type of `like`.
at::Tensor dense(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.defined() ? tensor.to(like.scalar_type()).contiguous() : tensor;
}

at::Tensor float_weight(const at::Tensor& weight) {
  return weight.defined() ? weight.to(c10::ScalarType::Float).contiguous() : weight;
}

/// Computes RMSNorm with ATen operators, in the order of the row kernels: x * rstd first, then
/// times the weight, with one rounding at the end.
AddRmsNormResult composed(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                          double eps) {
  const at::Tensor sum = residual.defined() ? x.add(residual) : x;
  const at::Tensor v = sum.to(compute_type(x));
  const at::Tensor rstd = at::rsqrt(v.pow(2).mean(-1, true).add(eps));
  at::Tensor y = v * rstd;
  if (weight.defined()) {
    y = y * weight.to(v.scalar_type());
  }
  return {y.to(x.scalar_type()), sum, rstd};
}

/// Computes RMSNorm's gradients with ATen operators. With g = gradient * weight: dx = rstd * (g - x
/// * rstd^2 * mean(g * x)).
std::pair<at::Tensor, at::Tensor> composed_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd,
                                                    const at::Tensor& sum_grad) {
  const at::Tensor v = x.to(rstd.scalar_type());
  const at::Tensor g = grad.to(rstd.scalar_type());
  const at::Tensor gw = weight.defined() ? g * weight.to(rstd.scalar_type()) : g;
  const at::Tensor pull = (gw * v).mean(-1, true) * rstd * rstd;
  at::Tensor x_grad = ((gw - v * pull) * rstd).to(x.scalar_type());
  if (sum_grad.defined()) {
    x_grad = x_grad.add(sum_grad.to(x.scalar_type()));
  }
  if (!weight.defined()) {
    return {x_grad, {}};
  }
  const at::Tensor terms = (g * v * rstd).reshape({-1, x.size(-1)});
  return {x_grad, terms.sum(0).to(weight.scalar_type())};
}

at::Tensor empty_rstd(const at::Tensor& x) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = 1;
  return at::empty(sizes, x.options().dtype(c10::ScalarType::Float));
}

/// Returns the RMSNorm weight in a type that the CUDA kernels support: fp32, or the type of x.
at::Tensor cuda_weight(const at::Tensor& weight, const at::Tensor& x) {
  return weight.defined() && weight.scalar_type() == x.scalar_type() ? weight.contiguous()
                                                                     : float_weight(weight);
}

RmsNorm cuda_call(const at::Tensor& x, const at::Tensor& weight) {
  const Rows rows(x);
  return {.x = x.const_data_ptr(),
          .weight = weight.defined() ? weight.const_data_ptr() : nullptr,
          .weight_is_float = !weight.defined() || weight.scalar_type() == c10::ScalarType::Float,
          .rows = rows.count,
          .size = rows.dim};
}

/// Computes RMSNorm with the CUDA kernel. x and the residual, if defined, must be dense.
void norm_on_cuda(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                  double eps, const AddRmsNormResult& result) {
  const at::Tensor scale = cuda_weight(weight, x);
  RmsNorm call = cuda_call(x, scale);
  call.eps = static_cast<float>(eps);
  call.out = result.out.mutable_data_ptr();
  call.rstd = out<float>(result.rstd);
  std::vector<at::Tensor> inputs{x};
  std::vector<at::Tensor> results{result.out};
  if (residual.defined()) {
    call.residual = residual.const_data_ptr();
    call.sum = result.sum.mutable_data_ptr();
    inputs.push_back(residual);
    results.push_back(result.sum);
  }
  run_cuda_kernel(call, residual.defined() ? "tessera::add_rms_norm" : "tessera::rms_norm", inputs,
                  results, x);
}

void norm_by_rows(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                  double eps, const AddRmsNormResult& result) {
  const at::Tensor scale = float_weight(weight);
  const Rows rows(x);
  with_row_kernels(x, [&](const auto& kernels, auto element) {
    using T = decltype(element);
    parallel_for(0, rows.count, rows.grain, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t at = begin * rows.dim;
      kernels.rms_norm(in<T>(x) + at, pointer<T>(residual, at), pointer<float>(scale),
                       residual.defined() ? out<T>(result.sum) + at : nullptr,
                       out<T>(result.out) + at, out<float>(result.rstd) + begin, end - begin,
                       rows.dim, static_cast<float>(eps));
    });
  });
}

/// Computes the RMSNorm of x + residual. If `residual` is undefined, computes the RMSNorm of x, and
/// the result's `sum` is unspecified.
AddRmsNormResult norm_of_sum(const at::Tensor& x, const at::Tensor& residual,
                             const at::Tensor& weight, double eps) {
  if (!has_kernels(x)) {
    return composed(x, residual, weight, eps);
  }
  const at::Tensor from = x.contiguous();
  AddRmsNormResult result{at::empty_like(from), residual.defined() ? at::empty_like(from) : from,
                          empty_rstd(x)};
  const at::Tensor added = dense(residual, x);
  has_cuda_kernels(x) ? norm_on_cuda(from, added, weight, eps, result)
                      : norm_by_rows(from, added, weight, eps, result);
  return result;
}

std::pair<at::Tensor, at::Tensor> backward_on_cuda(const at::Tensor& g, const at::Tensor& x,
                                                   const at::Tensor& weight, const at::Tensor& rstd,
                                                   const at::Tensor& sum_grad) {
  const at::Tensor scale = cuda_weight(weight, x);
  const at::Tensor of_rows = rstd.contiguous();
  const at::Tensor x_grad = at::empty(x.sizes(), x.options());
  RmsNormBackward call{.forward = cuda_call(x, scale),
                       .grad = g.const_data_ptr(),
                       .x_grad = x_grad.mutable_data_ptr()};
  // `const_cast` is safe here, because backward only reads rstd.
  call.forward.rstd = const_cast<float*>(in<float>(of_rows));
  at::Tensor weight_grad;
  at::Tensor terms;
  if (weight.defined()) {
    const Rows rows(x);
    terms = at::empty({rms_norm_blocks(rows.count, rows.dim), rows.dim}, rstd.options());
    // If x has no rows, no kernel writes the weight's gradient, which must then be zeros.
    weight_grad = rows.count == 0 ? at::zeros_like(scale) : at::empty_like(scale);
    call.weight_grad = weight_grad.mutable_data_ptr();
    call.terms = out<float>(terms);
  }
  std::vector<at::Tensor> inputs{g, x};
  if (sum_grad.defined()) {
    call.sum_grad = sum_grad.const_data_ptr();
    inputs.push_back(sum_grad);
  }
  run_cuda_kernel(call, "tessera::rms_norm_backward", inputs, {x_grad}, x_grad);
  return {x_grad, weight.defined() ? weight_grad.to(weight.scalar_type()) : weight_grad};
}

std::pair<at::Tensor, at::Tensor> backward_by_rows(const at::Tensor& g, const at::Tensor& x,
                                                   const at::Tensor& weight, const at::Tensor& rstd,
                                                   const at::Tensor& sum_grad) {
  const at::Tensor scale = float_weight(weight);
  const Rows rows(x);
  const at::Tensor x_grad = at::empty_like(x);
  // Each block of rows has its own row of `terms`, so threads never add to the same address.
  const at::Tensor terms =
      weight.defined() ? at::zeros({kBlocks, rows.dim}, rstd.options()) : at::Tensor();
  const std::int64_t block = (rows.count + kBlocks - 1) / kBlocks;
  with_row_kernels(x, [&](const auto& kernels, auto element) {
    using T = decltype(element);
    parallel_for(0, kBlocks,
                 std::max<std::int64_t>(1, rows.grain / std::max<std::int64_t>(block, 1)),
                 [&](std::int64_t first, std::int64_t last) {
                   for (std::int64_t b = first; b < last; ++b) {
                     const std::int64_t row = std::min(b * block, rows.count);
                     const std::int64_t at = row * rows.dim;
                     kernels.rms_norm_backward(
                         in<T>(g) + at, pointer<T>(sum_grad, at), in<T>(x) + at,
                         pointer<float>(scale), in<float>(rstd) + row, out<T>(x_grad) + at,
                         terms.defined() ? out<float>(terms) + b * rows.dim : nullptr,
                         std::min(block, rows.count - row), rows.dim);
                   }
                 });
  });
  if (!weight.defined()) {
    return {x_grad, {}};
  }
  // terms.sum(0) adds the 16 rows in an order that does not depend on the number of threads.
  return {x_grad, terms.sum(0).to(weight.scalar_type())};
}

}  // namespace

RmsNormResult rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const AddRmsNormResult result = norm_of_sum(x, {}, weight, eps);
  return {result.out, result.rstd};
}

AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                              const at::Tensor& weight, double eps) {
  return norm_of_sum(x, residual, weight, eps);
}

std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& rstd,
                                                    const at::Tensor& sum_grad) {
  if (!has_kernels(x)) {
    return composed_backward(grad, x, weight, rstd, sum_grad);
  }
  const at::Tensor g = dense(grad, x);
  const at::Tensor sum_g = dense(sum_grad, x);
  return has_cuda_kernels(x) ? backward_on_cuda(g, x.contiguous(), weight, rstd, sum_g)
                             : backward_by_rows(g, x.contiguous(), weight, rstd, sum_g);
}

// silu(gate) * up, the gate of SwiGLU; threads divide the elements. `gate` and `up` can be column
// ranges of one matrix product.

namespace {

/// Minimum number of elements of silu_mul that a thread processes.
constexpr std::int64_t kSiluGrain = 16384;  // must be a multiple of the vector width

/// Computes the gradients of silu_mul: silu'(g) = s * (1 + g * (1 - s)), s = sigmoid(g).
/// Recomputing silu(g) is cheaper than reading a saved silu(g).
std::pair<at::Tensor, at::Tensor> composed_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up) {
  const c10::ScalarType type = compute_type(gate);
  const at::Tensor g = gate.to(type);
  const at::Tensor d = grad.to(type);
  const at::Tensor sigmoid = at::sigmoid(g);
  const at::Tensor slope = sigmoid * (1 + g * (1 - sigmoid));
  return {(d * up.to(type) * slope).to(gate.scalar_type()), (d * g * sigmoid).to(up.scalar_type())};
}

/// Returns the distance between the beginnings of a tensor's rows. Returns 0 if the distance
/// varies, or if the elements of a row are not consecutive.
std::int64_t row_stride(const at::Tensor& x) {
  if (x.dim() < 2 || x.stride(-1) != 1) {
    return 0;
  }
  for (std::int64_t d = x.dim() - 2; d > 0; --d) {
    if (x.stride(d - 1) != x.stride(d) * x.size(d)) {
      return 0;
    }
  }
  return x.stride(-2);
}

/// The inputs of silu_mul for the kernels. `gate` and `up` are not copied if they are column ranges
/// of one matrix.
struct GateRows {
  GateRows(const at::Tensor& gate_in, const at::Tensor& up_in)
      : gate(gate_in), up(up_in), apart(row_stride(gate) > 0 && row_stride(up) > 0) {
    apart = apart && !(gate.is_contiguous() && up.is_contiguous());
    if (!apart) {
      gate = gate.contiguous();
      up = up.contiguous();
    }
  }

  std::int64_t stride_of(const at::Tensor& x) const { return apart ? row_stride(x) : 0; }

  SiluMul call(const at::Tensor& result) const {
    const std::int64_t size = apart ? gate.size(-1) : gate.numel();
    return {.gate = gate.const_data_ptr(),
            .up = up.const_data_ptr(),
            .gate_stride = stride_of(gate),
            .up_stride = stride_of(up),
            .rows = size == 0 ? 0 : gate.numel() / size,
            .size = size,
            .out = result.defined() ? result.mutable_data_ptr() : nullptr};
  }

  at::Tensor gate;
  at::Tensor up;
  bool apart;
};

template <class Run>
void for_each_range(const SiluMul& call, Run&& run) {
  parallel_for(0, call.rows * call.size, kSiluGrain, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t first = begin % call.size;
      const std::int64_t count = std::min(end - begin, call.size - first);
      run(begin / call.size, first, count);
      begin += count;
    }
  });
}

template <class T>
void on_host(const RowKernels<T>& kernels, const SiluMul& p) {
  for_each_range(p, [&](std::int64_t row, std::int64_t first, std::int64_t count) {
    kernels.silu_mul(static_cast<const T*>(p.gate) + row * p.gate_stride + first,
                     static_cast<const T*>(p.up) + row * p.up_stride + first,
                     static_cast<T*>(p.out) + row * p.size + first, count);
  });
}

template <class T>
void on_host(const RowKernels<T>& kernels, const SiluMulBackward& p) {
  const SiluMul& in = p.forward;
  for_each_range(in, [&](std::int64_t row, std::int64_t first, std::int64_t count) {
    kernels.silu_mul_backward(
        static_cast<const T*>(p.grad) + row * in.size + first,
        static_cast<const T*>(in.gate) + row * in.gate_stride + first,
        static_cast<const T*>(in.up) + row * in.up_stride + first,
        static_cast<T*>(p.gate_grad) + row * p.gate_grad_stride + first,
        static_cast<T*>(p.up_grad) + row * p.up_grad_stride + first,
        in.out != nullptr ? static_cast<T*>(in.out) + row * in.size + first : nullptr, count);
  });
}

/// Computes silu_mul's gradients of gate and up. Also writes the result of forward to `product`, if
/// defined. `name`: the operator for a FakeMode's observer.
std::pair<at::Tensor, at::Tensor> gradients_of(const at::Tensor& grad, const at::Tensor& gate,
                                               const at::Tensor& up, const at::Tensor& product,
                                               const char* name) {
  // Under autocast the gradient can have another type than `gate`, and must be converted.
  const at::Tensor g = grad.to(gate.scalar_type()).contiguous();
  const GateRows rows(gate, up);
  // Both gradients get the shape and type of `gate`, because `up` has the same shape and type.
  const at::Tensor gate_grad = at::empty(gate.sizes(), gate.options());
  const at::Tensor up_grad = at::empty(gate.sizes(), gate.options());
  const SiluMulBackward call{.forward = rows.call(product),
                             .grad = g.const_data_ptr(),
                             .gate_grad = gate_grad.mutable_data_ptr(),
                             .up_grad = up_grad.mutable_data_ptr(),
                             .gate_grad_stride = rows.stride_of(gate_grad),
                             .up_grad_stride = rows.stride_of(up_grad)};
  if (has_cuda_kernels(g)) {
    std::vector<at::Tensor> results{gate_grad, up_grad};
    if (product.defined()) {
      results.insert(results.begin(), product);
    }
    run_cuda_kernel(call, name, {g, gate, up}, results, results.front());
  } else {
    with_row_kernels(g, [&](const auto& kernels, auto) { on_host(kernels, call); });
  }
  return {gate_grad, up_grad};
}

at::Tensor composed(const at::Tensor& gate, const at::Tensor& up) {
  const c10::ScalarType type = compute_type(gate);
  return (at::silu(gate.to(type)) * up.to(type)).to(gate.scalar_type());
}

}  // namespace

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  if (!has_kernels(gate)) {
    return composed(gate, up);
  }
  at::Tensor result = at::empty(gate.sizes(), gate.options());
  const GateRows rows(gate, up);
  const SiluMul call = rows.call(result);
  if (has_cuda_kernels(result)) {
    run_cuda_kernel(call, "tessera::silu_mul", {gate, up}, {result});
  } else {
    with_row_kernels(result, [&](const auto& kernels, auto) { on_host(kernels, call); });
  }
  return result;
}

std::pair<at::Tensor, at::Tensor> silu_mul_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up) {
  if (!has_kernels(gate)) {
    return composed_backward(grad, gate, up);
  }
  return gradients_of(grad, gate, up, {}, "tessera::silu_mul_backward");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> silu_mul_with_gradients(const at::Tensor& grad,
                                                                       const at::Tensor& gate,
                                                                       const at::Tensor& up) {
  if (!has_kernels(gate)) {
    auto [gate_grad, up_grad] = composed_backward(grad, gate, up);
    return {composed(gate, up), gate_grad, up_grad};
  }
  const at::Tensor product = at::empty(gate.sizes(), gate.options());
  const auto [gate_grad, up_grad] =
      gradients_of(grad, gate, up, product, "tessera::silu_mul_with_gradients");
  return {product, gate_grad, up_grad};
}

namespace {

/// Computes the rotation with ATen operators. `transposed` selects the backward, which multiplies
/// by sin before swapping the halves of a head, because the halves can have different sin.
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

template <class T>
void turn_position(const RowKernels<T>& kernels, const Rotary& p, const RotaryHeads& part,
                   std::int64_t position) {
  const std::int64_t sample = position / p.sequence;
  const std::int64_t place = position % p.sequence;
  const std::int64_t table = place * 2 * p.half;
  // The kernel writes contiguous heads. So one call processes all heads of a position if the heads
  // of `out` are contiguous; otherwise each head needs its own call.
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

/// Rotates each of `tensors`. In a FakeMode, the observer receives `name` (the operator's name),
/// `inputs` and `results`.
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

/// Returns x, or a copy if the elements of a head are not consecutive. Views of a fused projection
/// are not copied.
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
