// Random numbers and dropout on a CPU. A number is a function of key and global index, so loops may
// run in any order. CUDA kernels compute the same functions (random_elements.h).
#include "tessera/kernels/detail/random.h"
#include "tessera/kernels/detail/fake_state.h"

#include <ATen/ops/empty_like.h>

#include <atomic>
#include <type_traits>
#include <variant>

#include "fused_dispatch.h"
#include "random_elements.h"
#include "tessera/core/error.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

/// A pointer to the registered CUDA kernels. The pointer is atomic, because a program can load
/// libtessera_cuda.so while other threads run.
std::atomic<const CudaKernels*> registered = nullptr;

constexpr std::int64_t kGrain = 4096;

/// Calls run(box, first) on several threads, for ranges of elements of `local`. A call processes
/// the elements from index `first` up to, not including, box.numel.
template <class Run>
void for_each_range(const at::Tensor& local, const GlobalPlace& place, const Run& run) {
  for (const Box& box : place.boxes) {
    const BoxView view = box_view(box, place, local);
    parallel_for(0, view.numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      BoxView range = view;
      range.numel = end;
      run(range, begin);
    });
  }
}

}  // namespace

/// Registers a copy of the CUDA kernels `kernels`. The copy is never freed, because destructors of
/// static objects can still call the kernels.
void register_cuda_kernels(const CudaKernels& kernels) {
  registered = new CudaKernels(kernels);
}

const CudaKernels& cuda_kernels() {
  const CudaKernels* kernels = registered;
  TESSERA_CHECK(
      kernels != nullptr,
      "a kernel was called on CUDA, but libtessera_cuda.so is not loaded; build with a CUDA "
      "toolkit and use a world of device \"cuda\"");
  return *kernels;
}

TruncatedNormal truncated_normal(double mean, double std, double low, double high) {
  TESSERA_CHECK(std > 0.0 && low < high, "truncated normal: std is ", std, " and the bounds are ",
                low, " and ", high, "; pass a positive std and increasing bounds");
  const double a = (low - mean) / std;
  const double b = (high - mean) / std;
  const bool mirrored = a + b > 0.0;
  const double from = normal_cdf(mirrored ? -b : a);
  const double to = normal_cdf(mirrored ? -a : b);
  TESSERA_CHECK(to - from > 1e-300, "a normal(", mean, ", ", std, ") has probability 0 between ",
                low, " and ", high, "; move the bounds towards the mean");
  return {mean, mirrored ? -std : std, low, high, from, to - from};
}

GlobalPlace GlobalPlace::whole(std::vector<std::int64_t> sizes, std::int64_t first_element) {
  const std::vector<std::int64_t> origin(sizes.size(), 0);
  return {{Box{origin, origin, sizes}}, sizes, first_element};
}

void fill_random(const at::Tensor& local, const GlobalPlace& place,
                 const Distribution& distribution, PhiloxKey key) {
  if (local.is_cuda()) {
    return cuda_kernels().fill_random(local, place, distribution, key);
  }
  // Throws Error for devices other than CPU and CUDA, for example for a meta parameter.
  TESSERA_CHECK(local.is_cpu(), "random numbers cannot fill a tensor on ", local.device(),
                "; call nn::to_empty, or move the tensor to cpu or cuda");
  if (in_fake_mode()) {
    return;
  }
  with_float_type(local.scalar_type(), "a random fill", [&]<class T>() {
    auto* const data = static_cast<T*>(local.mutable_data_ptr());
    std::visit(
        [&](const auto& draw) {
          for_each_range(local, place, [&](const BoxView& range, std::int64_t first) {
            fill_elements(data, range, draw, key, first, /*step=*/1);
          });
        },
        distribution);
  });
}

at::Tensor dropout(const at::Tensor& x, const GlobalPlace& place, double p, PhiloxKey key) {
  // The CUDA kernels use one index for `out` and `x`, so x must be contiguous.
  const at::Tensor from = x.contiguous();
  at::Tensor out = at::empty_like(from);
  if (from.is_cuda()) {
    cuda_kernels().dropout(out, from, place, p, key);
  } else if (!in_fake_mode()) {
    with_float_type(from.scalar_type(), "dropout", [&]<class T>() {
      using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
      for_each_range(from, place, [&](const BoxView& range, std::int64_t first) {
        drop_elements(kernels::out<T>(out), in<T>(from), range, p,
                      static_cast<Compute>(1.0 / (1.0 - p)), key, first, /*step=*/1);
      });
    });
  }
  return out;
}

}  // namespace tessera::kernels
