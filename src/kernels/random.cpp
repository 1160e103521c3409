#include "tessera/kernels/random.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <variant>

#include "box_rows.h"
#include "float_types.h"
#include "parallel.h"
#include "tessera/core/error.h"
#include "tessera/kernels/cuda_kernels.h"

namespace tessera::kernels {
namespace {

constexpr std::int64_t kGrain = 4096;

/// Calls run(local offset, index for the random number, length) for every row, in parallel.
template <class Run>
void for_each_row(const at::Tensor& local, const GlobalPlace& place, Run&& run) {
  for (const Box& box : place.boxes) {
    const BoxRows rows(box, place.sizes, local.strides());
    parallel_for(0, rows.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      rows.for_range(begin, end, [&](std::int64_t offset, std::int64_t index, std::int64_t length) {
        run(offset, static_cast<std::uint64_t>(index + place.first_element), length);
      });
    });
  }
}

constexpr std::int64_t kBatch = 64;

/// Turns uniform numbers into draws. For all at once in the centre, where most are and the compiler
/// can vectorise; then one by one in the tails. The same bits as draw(u).
template <class Draw>
void draw_batch(const Draw& draw, double* values, std::int64_t n) {
  if constexpr (requires { draw.probability(0.5); }) {
    double p[kBatch];
    for (std::int64_t i = 0; i < n; ++i) p[i] = draw.probability(values[i]);
    for (std::int64_t i = 0; i < n; ++i) values[i] = central_quantile(p[i]);
    for (std::int64_t i = 0; i < n; ++i) {
      if (!is_central(p[i])) values[i] = tail_quantile(p[i]);
    }
    for (std::int64_t i = 0; i < n; ++i) values[i] = draw.from_quantile(values[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) values[i] = draw(values[i]);
  }
}

void uniform_batch(PhiloxKey key, std::uint64_t index, double* values, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    values[i] = uniform_at(key.seed, key.stream, index + static_cast<std::uint64_t>(i));
  }
}

template <class T, class Draw>
void fill_as(const at::Tensor& local, const GlobalPlace& place, const Draw& draw, PhiloxKey key) {
  T* data = static_cast<T*>(local.data_ptr());
  const std::int64_t stride = local.dim() == 0 ? 1 : local.strides().back();
  for_each_row(local, place, [&](std::int64_t offset, std::uint64_t index, std::int64_t length) {
    double values[kBatch];
    for (std::int64_t start = 0; start < length; start += kBatch) {
      const std::int64_t n = std::min(kBatch, length - start);
      uniform_batch(key, index + static_cast<std::uint64_t>(start), values, n);
      draw_batch(draw, values, n);
      T* out = data + offset + start * stride;
      for (std::int64_t i = 0; i < n; ++i) out[i * stride] = narrow<T>(values[i]);
    }
  });
}

template <class T>
void dropout_as(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                PhiloxKey key) {
  using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const T* from = static_cast<const T*>(x.const_data_ptr());
  T* to = static_cast<T*>(out.data_ptr());
  const auto scale = static_cast<Compute>(1.0 / (1.0 - p));
  for_each_row(x, place, [&](std::int64_t offset, std::uint64_t index, std::int64_t length) {
    for (std::int64_t i = 0; i < length; ++i) {
      const double u = uniform_at(key.seed, key.stream, index + static_cast<std::uint64_t>(i));
      const auto value = static_cast<Compute>(from[offset + i]);
      to[offset + i] = u < p ? T(0) : static_cast<T>(value * scale);
    }
  });
}

}  // namespace

GlobalPlace GlobalPlace::whole(std::vector<std::int64_t> sizes, std::int64_t first_element) {
  const std::vector<std::int64_t> origin(sizes.size(), 0);
  return {{Box{origin, origin, sizes}}, sizes, first_element};
}

void fill_random(const at::Tensor& local, const GlobalPlace& place,
                 const Distribution& distribution, PhiloxKey key) {
  if (local.is_cuda()) return cuda_kernels().fill_random(local, place, distribution, key);
  TESSERA_CHECK(local.is_cpu(), "random numbers for a tensor on ", local.device(),
                " were asked for; call nn::to_empty, or put it on cpu or cuda");
  with_float_type(local.scalar_type(), "a random fill", [&]<class T>() {
    std::visit([&](const auto& draw) { fill_as<T>(local, place, draw, key); }, distribution);
  });
}

at::Tensor dropout(const at::Tensor& x, const GlobalPlace& place, double p, PhiloxKey key) {
  const at::Tensor from = x.contiguous();
  at::Tensor out = at::empty_like(from);
  if (from.is_cuda()) {
    cuda_kernels().dropout(out, from, place, p, key);
  } else {
    with_float_type(from.scalar_type(), "dropout",
                    [&]<class T>() { dropout_as<T>(out, from, place, p, key); });
  }
  return out;
}

}  // namespace tessera::kernels
