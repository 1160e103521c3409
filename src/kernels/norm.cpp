// Lists of tensors for the kernels of device/norm.h.
#include "tessera/kernels/detail/pack.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "device/norm.h"
#include "fused_dispatch.h"

namespace tessera::kernels {
namespace {

constexpr auto kDouble = c10::ScalarType::Double;

/// Tensors of one type, and the number of their first chunk among those of all.
struct NormLaunch {
  SquareSums call;
  std::vector<at::Tensor> tensors;
  std::int64_t first = 0;
};

/// Cuts the tensors of one kind into launches, type by type. Returns the number of the next chunk.
std::int64_t add_launches(std::vector<NormLaunch>& launches, std::vector<at::Tensor> tensors,
                          std::int64_t chunks) {
  std::ranges::stable_sort(tensors, {}, &at::Tensor::scalar_type);
  const std::size_t begin = launches.size();
  for (const at::Tensor& tensor : tensors) {
    const NormPiece piece{tensor.const_data_ptr(), tensor.numel()};
    if (piece.size == 0) {
      continue;
    }
    if (launches.size() == begin ||
        launches.back().tensors.front().scalar_type() != tensor.scalar_type() ||
        !launches.back().call.list.add(piece)) {
      launches.emplace_back().first = chunks;
      launches.back().call.list.add(piece);
    }
    launches.back().tensors.push_back(tensor);
    chunks = launches.back().first + launches.back().call.list.chunks;
  }
  return chunks;
}

}  // namespace

bool has_norm_kernels(const std::vector<at::Tensor>& tensors, c10::Device device) {
  const bool on_cuda = device.is_cuda() || (device.is_cpu() && fake_device() == c10::kCUDA);
  return on_cuda && std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
           return has_cuda_kernels(tensor) && tensor.device() == device &&
                  tensor.is_non_overlapping_and_dense();
         });
}

at::Tensor squares_on_cuda(const std::vector<at::Tensor>& owned,
                           const std::vector<at::Tensor>& plain,
                           const std::vector<at::Tensor>& copies, c10::Device device) {
  std::vector<NormLaunch> launches;
  SumKinds kinds;
  std::int64_t chunks = 0;
  for (std::size_t kind = 0; const auto* tensors : {&owned, &plain, &copies}) {
    chunks = add_launches(launches, *tensors, chunks);
    kinds.ends[kind++] = chunks;
  }
  const at::Tensor sums = at::empty({chunks}, at::dtype(kDouble).device(device));
  at::Tensor squares = at::empty({2}, sums.options());
  for (NormLaunch& launch : launches) {
    launch.call.sums = static_cast<double*>(sums.mutable_data_ptr()) + launch.first;
    run_cuda_kernel(launch.call, "tessera::square_sums", launch.tensors, {sums},
                    launch.tensors.front());
  }
  kinds.sums = static_cast<const double*>(sums.const_data_ptr());
  kinds.out = static_cast<double*>(squares.mutable_data_ptr());
  run_cuda_kernel(kinds, "tessera::sum_kinds", {sums}, {squares}, squares);
  return squares;
}

NormAndFactor clip_norm_on_cuda(const at::Tensor& squares, double max_norm) {
  const at::Tensor both = at::empty({2}, squares.options());
  at::Tensor rounded = at::empty({}, squares.options().dtype(c10::ScalarType::Float));
  const ClipNorm call{.sums = static_cast<const double*>(squares.const_data_ptr()),
                      .max_norm = max_norm,
                      .norm_and_factor = static_cast<double*>(both.mutable_data_ptr()),
                      .norm = static_cast<float*>(rounded.mutable_data_ptr())};
  run_cuda_kernel(call, "tessera::clip_norm", {squares}, {both, rounded}, both);
  return {both[0], both[1], rounded};
}

}  // namespace tessera::kernels
