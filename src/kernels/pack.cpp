// Copies of many tensors. The CUDA kernel copies rows: for example between a tensor and the part of
// a buffer with a row for each rank.
#include "tessera/kernels/detail/lists.h"

#include <ATen/ops/_foreach_copy.h>

#include <map>
#include <optional>
#include <utility>

#include "extents.h"
#include "fused_dispatch.h"

namespace tessera::kernels {
namespace {

/// Whether the kernel supports the types and devices.
bool is_for_kernel(const at::Tensor& from, const at::Tensor& to) {
  return has_cuda_kernels(from) && has_cuda_kernels(to) && from.device() == to.device() &&
         from.sizes() == to.sizes();
}

Element element_of(c10::ScalarType type) {
  return type == c10::ScalarType::Float      ? Element::kFloat
         : type == c10::ScalarType::BFloat16 ? Element::kBFloat16
                                             : Element::kHalf;
}

/// A launch of copies from one element type to another, on one device.
class PackLaunch {
 public:
  PackLaunch() = default;
  PackLaunch(const PackLaunch&) = delete;
  PackLaunch& operator=(const PackLaunch&) = delete;

  void add(const PackPiece& piece, const at::Tensor& from, const at::Tensor& to) {
    if (!call_.list.add(piece)) {
      run();
      call_.list.add(piece);
    }
    from_.push_back(from);
    to_.push_back(to);
  }

  void run() {
    call_.to = element_of(to_.front().scalar_type());
    run_cuda_kernel(call_, "tessera::pack", from_, to_, from_.front());
    call_.list = {};
    from_.clear();
    to_.clear();
  }

 private:
  Pack call_{};
  std::vector<at::Tensor> from_, to_;
};

}  // namespace

std::optional<PackPiece> pack_piece(const at::Tensor& from, const at::Tensor& to) {
  std::vector<Extent> extents;
  for (std::int64_t d = from.dim() - 1; d >= 0; --d) {
    add_extent(extents, {from.size(d), from.stride(d), to.stride(d)});
  }
  if (extents.empty() || extents.front().from_stride != 1 || extents.front().to_stride != 1) {
    extents.insert(extents.begin(), {1, 1, 1});
  }
  if (extents.size() > 2) {
    return std::nullopt;
  }
  const Extent rows = extents.size() == 2 ? extents[1] : Extent{1, 0, 0};
  return PackPiece{.from = from.const_data_ptr(),
                   .to = to.mutable_data_ptr(),
                   .rows = rows.size,
                   .size = extents.front().size,
                   .from_stride = rows.from_stride,
                   .to_stride = rows.to_stride};
}

void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from,
              bool non_blocking) {
  std::map<std::pair<c10::ScalarType, c10::ScalarType>, PackLaunch> launches;
  std::vector<at::Tensor> other_to, other_from;
  for (std::size_t i = 0; i < to.size(); ++i) {
    const std::optional<PackPiece> piece =
        is_for_kernel(from[i], to[i]) ? pack_piece(from[i], to[i]) : std::nullopt;
    if (piece) {
      if (piece->numel() > 0) {
        launches[{from[i].scalar_type(), to[i].scalar_type()}].add(*piece, from[i], to[i]);
      }
    } else {
      other_to.push_back(to[i]);
      other_from.push_back(from[i]);
    }
  }
  for (auto& [types, launch] : launches) {
    launch.run();
  }
  if (!other_to.empty()) {
    at::_foreach_copy_(other_to, other_from, non_blocking);
  }
}

}  // namespace tessera::kernels
