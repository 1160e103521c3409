// Random numbers on a CPU, the registration of the equivalent CUDA kernels, and dropout. Each
// number is a function of key and global index, so loops may run in any order on any number of
// threads.
#include "tessera/kernels/detail/random.h"
#include "tessera/kernels/detail/fake_state.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <atomic>
#include <variant>

#include "float_types.h"
#include "fused_dispatch.h"
#include "random_elements.h"
#include "tessera/core/error.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

/// The registered CUDA kernels. The pointer is atomic, because libtessera_cuda.so may be loaded
/// while other threads run.
std::atomic<const CudaKernels*> registered = nullptr;

constexpr std::int64_t kGrain = 4096;  // minimum number of elements for a thread

/// The rows of a Box (a rectangular part of a tensor), that is, its lines of elements along the
/// last dimension. A range of the part's elements, numbered in row-major order, consists of whole
/// and partial rows, so threads can divide the elements evenly.
class BoxRows {
 public:
  // The object refers to its arguments, which must outlive the object. A box without dimensions is
  // one element.
  BoxRows(const Box& box, c10::IntArrayRef global_sizes, c10::IntArrayRef local_strides)
      : box_(box), strides_(local_strides), global_strides_(box.sizes.size(), 1) {
    for (std::size_t d = box.sizes.size(); d-- > 1;) {
      global_strides_[d - 1] = global_strides_[d] * global_sizes[d];
    }
    columns_ = box.sizes.empty() ? 1 : box.sizes.back();
    for (const std::int64_t size : box.sizes) {
      numel_ *= size;
    }
  }

  std::int64_t numel() const { return numel_; }

  /// Calls run(local offset, global index, length) for the whole and partial rows of the elements
  /// [begin, end). A call covers one row at most, because the next row begins elsewhere in memory
  /// and in the global tensor.
  template <class Run>
  void for_range(std::int64_t begin, std::int64_t end, Run&& run) const {
    while (begin < end) {
      const std::int64_t column = begin % columns_;
      const std::int64_t length = std::min(end - begin, columns_ - column);
      const auto [local, global] = locate(begin);
      run(local, global, length);
      begin += length;
    }
  }

 private:
  struct Position {
    std::int64_t local;
    std::int64_t global;
  };

  // The position of an element of the box. The function divides for each dimension, so it is called
  // once per row and not once per element.
  Position locate(std::int64_t element) const {
    Position position{0, 0};
    for (std::size_t d = box_.sizes.size(); d-- > 0;) {
      const std::int64_t i = element % box_.sizes[d];
      element /= box_.sizes[d];
      position.local += (box_.local_offset[d] + i) * strides_[d];
      position.global += (box_.global_offset[d] + i) * global_strides_[d];
    }
    return position;
  }

  const Box& box_;
  c10::IntArrayRef strides_;
  std::vector<std::int64_t> global_strides_;
  // Sizes of the box itself, not of the tensor: the length of a row, and the number of elements.
  std::int64_t columns_ = 1;
  std::int64_t numel_ = 1;
};

/// Calls run(local offset, global index, length) in parallel, for ranges of elements along the last
/// dimension. The global index selects the random number.
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

// Number of random numbers that are drawn together, in an array on the stack.
constexpr std::int64_t kBatch = 64;

/// Converts a batch of uniform numbers, with the same bits as draw(u) for each number. Computes the
/// formula for the centre of the distribution for all numbers, which the compiler vectorises, and
/// then recomputes the few numbers in the tails.
template <class Draw>
void draw_batch(const Draw& draw, double* values, std::int64_t n) {
  // Only distributions with normal quantiles use batches; the others are cheap without them.
  if constexpr (requires { draw.probability(0.5); }) {
    double p[kBatch];
    for (std::int64_t i = 0; i < n; ++i) {
      p[i] = draw.probability(values[i]);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      values[i] = central_quantile(p[i]);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      // The tails have a loop of their own, because a branch would prevent vectorisation of the
      // first loop; few numbers are in the tails.
      if (!is_central(p[i])) {
        values[i] = tail_quantile(p[i]);
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {
      values[i] = draw.from_quantile(values[i]);
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      values[i] = draw(values[i]);
    }
  }
}

/// Fills a batch of uniform numbers. The random number depends on the element's index, so a batch
/// may begin anywhere.
void uniform_batch(PhiloxKey key, std::uint64_t index, double* values, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    values[i] = uniform_at(key.seed, key.stream, index + static_cast<std::uint64_t>(i));
  }
}

/// Fills elements in batches on the stack, so a fill of any size allocates no memory. Computes in
/// fp64 and rounds once.
template <class T, class Draw>
void fill_as(const at::Tensor& local, const GlobalPlace& place, const Draw& draw, PhiloxKey key) {
  auto* data = static_cast<T*>(local.data_ptr());
  // Supports all strides, because a parameter may be a view.
  const std::int64_t stride = local.dim() == 0 ? 1 : local.strides().back();
  for_each_row(local, place, [&](std::int64_t offset, std::uint64_t index, std::int64_t length) {
    double values[kBatch];
    for (std::int64_t start = 0; start < length; start += kBatch) {
      const std::int64_t n = std::min(kBatch, length - start);
      uniform_batch(key, index + static_cast<std::uint64_t>(start), values, n);
      draw_batch(draw, values, n);
      T* out = data + offset + start * stride;
      for (std::int64_t i = 0; i < n; ++i) {
        out[i * stride] = narrow<T>(values[i]);
      }
    }
  });
}

/// Dropout on a CPU. `x` and `out` are contiguous, so their elements have equal offsets.
template <class T>
void dropout_as(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                PhiloxKey key) {
  using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto* from = static_cast<const T*>(x.const_data_ptr());
  auto* to = static_cast<T*>(out.data_ptr());
  const auto scale = static_cast<Compute>(1.0 / (1.0 - p));
  for_each_row(x, place, [&](std::int64_t offset, std::uint64_t index, std::int64_t length) {
    for (std::int64_t i = 0; i < length; ++i) {
      // The comparison is in fp64, so that p is exact even for tensors of half precision.
      const double u = uniform_at(key.seed, key.stream, index + static_cast<std::uint64_t>(i));
      const auto value = static_cast<Compute>(from[offset + i]);
      to[offset + i] = u < p ? T(0) : static_cast<T>(value * scale);
    }
  });
}

}  // namespace

/// Registers a copy of `kernels`. It is never freed: destructors of static objects may use kernels.
void register_cuda_kernels(const CudaKernels& kernels) {
  registered = new CudaKernels(kernels);
}

const CudaKernels& cuda_kernels() {
  const CudaKernels* kernels = registered;
  TESSERA_CHECK(
      kernels != nullptr,
      "a kernel was to run on CUDA, but libtessera_cuda.so is not loaded; build with a CUDA "
      "toolkit and use a world of device \"cuda\"");
  return *kernels;
}

/// The distribution is mirrored if most of the interval is in the upper tail, because probabilities
/// near 1 have few significant digits (see TruncatedNormal).
TruncatedNormal truncated_normal(double mean, double std, double low, double high) {
  TESSERA_CHECK(std > 0.0 && low < high, "a truncated normal with std ", std, " between ", low,
                " and ", high, " was asked for; std must be positive and the bounds in order");
  const double a = (low - mean) / std;
  const double b = (high - mean) / std;
  const bool mirrored = a + b > 0.0;
  const double from = normal_cdf(mirrored ? -b : a);
  const double to = normal_cdf(mirrored ? -a : b);
  TESSERA_CHECK(to - from > 1e-300, "a normal(", mean, ", ", std, ") has no mass between ", low,
                " and ", high, "; move the bounds towards the mean");
  return {mean, mirrored ? -std : std, low, high, from, to - from};
}

/// The place of a whole tensor: one Box from the origin, with equal local and global offsets.
GlobalPlace GlobalPlace::whole(std::vector<std::int64_t> sizes, std::int64_t first_element) {
  const std::vector<std::int64_t> origin(sizes.size(), 0);
  return {{Box{origin, origin, sizes}}, sizes, first_element};
}

void fill_random(const at::Tensor& local, const GlobalPlace& place,
                 const Distribution& distribution, PhiloxKey key) {
  if (local.is_cuda()) {
    return cuda_kernels().fill_random(local, place, distribution, key);
  }
  // This mainly refuses meta tensors, such as parameters whose memory was never allocated.
  TESSERA_CHECK(local.is_cpu(), "random numbers for a tensor on ", local.device(),
                " were asked for; call nn::to_empty, or put it on cpu or cuda");
  if (in_fake_mode()) {
    return;
  }
  with_float_type(local.scalar_type(), "a random fill", [&]<class T>() {
    std::visit([&](const auto& draw) { fill_as<T>(local, place, draw, key); }, distribution);
  });
}

at::Tensor dropout(const at::Tensor& x, const GlobalPlace& place, double p, PhiloxKey key) {
  // x must be contiguous for CUDA too: the kernels index `out` and `x` in the same way.
  const at::Tensor from = x.contiguous();
  at::Tensor out = at::empty_like(from);
  if (from.is_cuda()) {
    cuda_kernels().dropout(out, from, place, p, key);
  } else if (!in_fake_mode()) {
    with_float_type(from.scalar_type(), "dropout",
                    [&]<class T>() { dropout_as<T>(out, from, place, p, key); });
  }
  return out;
}

}  // namespace tessera::kernels
