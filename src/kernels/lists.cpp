#include "tessera/kernels/detail/lists.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "device/adamw.h"
#include "device/lists.h"
#include "extents.h"
#include "fused_dispatch.h"
#include "tessera/core/error.h"
#include "tessera/kernels/detail/fake_state.h"

namespace tessera::kernels {

// Copies many tensors in one launch. The CUDA kernel copies equally spaced rows, for example
// between a tensor and a buffer that has a row for each rank.

namespace {

bool is_for_kernel(const at::Tensor& from, const at::Tensor& to) {
  return has_cuda_kernels(from) && has_cuda_kernels(to) && from.device() == to.device() &&
         from.sizes() == to.sizes();
}

/// A launch of the copy kernel. All copies of a launch have the same two element types and device.
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
    call_.to = element_of(to_.front());
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

// The 2-norm of lists of tensors. A launch of a kernel of device/lists.h takes a limited number of
// tensors, so a long list needs several launches.

namespace {

constexpr auto kDouble = c10::ScalarType::Double;

/// A launch of the norm kernel, for one dtype. `first`: index of the first chunk of this launch.
struct NormLaunch {
  SquareSums call;
  std::vector<at::Tensor> tensors;
  std::int64_t first = 0;
};

/// Adds launches for `tensors`, sorted by dtype. Returns the total number of chunks in `launches`.
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
  const at::Tensor all = at::empty({3}, squares.options());
  at::Tensor rounded = at::empty({}, squares.options().dtype(c10::ScalarType::Float));
  const ClipNorm call{.sums = static_cast<const double*>(squares.const_data_ptr()),
                      .max_norm = max_norm,
                      .norm_and_factor = static_cast<double*>(all.mutable_data_ptr()),
                      .norm = static_cast<float*>(rounded.mutable_data_ptr())};
  run_cuda_kernel(call, "tessera::clip_norm", {squares}, {all, rounded}, all);
  return {all[0], all[1], all[2], rounded};
}

// AdamW over lists of tensors. The tensors are split into pieces (AdamWPiece) for the kernel in
// device/adamw.h, which is compiled for GPUs and for the CPU.

namespace {

/// Equally spaced rows of a local tensor. The elements of a row are contiguous in the local tensor
/// and in the global tensor.
struct PlacedRows {
  std::int64_t local = 0;  ///< offset of the first row in the local tensor
  std::int64_t count = 1;
  std::int64_t size = 1;
  std::int64_t stride = 0;  ///< distance between the beginnings of rows in the global tensor
  std::int64_t place = 0;   ///< index of the first row's first element in the global tensor
};

/// Returns the rows of `box`, a rectangular region of the global tensor.
std::vector<PlacedRows> rows_of(const Box& box, const GlobalPlace& place, at::IntArrayRef sizes) {
  PlacedRows rows{.place = place.first_element};
  std::vector<Extent> extents;
  std::int64_t local_stride = 1;
  std::int64_t global_stride = 1;
  for (std::size_t d = box.sizes.size(); d-- > 0;) {
    rows.local += box.local_offset[d] * local_stride;
    rows.place += box.global_offset[d] * global_stride;
    add_extent(extents, {box.sizes[d], local_stride, global_stride});
    local_stride *= sizes[d];
    global_stride *= place.sizes[d];
  }
  auto next = extents.begin();
  if (next != extents.end() && next->from_stride == 1 && next->to_stride == 1) {
    rows.size = next++->size;
  }
  if (next != extents.end() && next->from_stride == rows.size) {
    rows.count = next->size;
    rows.stride = next++->to_stride;
  }
  std::vector<PlacedRows> all{rows};
  for (; next != extents.end(); ++next) {
    std::vector<PlacedRows> repeated;
    for (std::int64_t i = 0; i < next->size; ++i) {
      for (PlacedRows each : all) {
        each.local += i * next->from_stride;
        each.place += i * next->to_stride;
        repeated.push_back(each);
      }
    }
    all = std::move(repeated);
  }
  return all;
}

/// Returns the rows of a shard; one row for fp32 moments, which are not rounded stochastically.
std::vector<PlacedRows> rows_of(const AdamWTensors& tensors) {
  const std::int64_t numel = tensors.parameter.numel();
  if (tensors.exp_avg.scalar_type() == c10::ScalarType::Float) {
    return {PlacedRows{.size = numel}};
  }
  std::vector<PlacedRows> all;
  for (const Box& box : tensors.place.boxes) {
    const std::vector<PlacedRows> more = rows_of(box, tensors.place, tensors.local_sizes);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

void* moved(const at::Tensor& tensor, std::int64_t elements) {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         elements * static_cast<std::int64_t>(tensor.element_size());
}

AdamWPiece piece_of(const AdamWTensors& tensors, const PlacedRows& rows) {
  return {.parameter = static_cast<float*>(moved(tensors.parameter, rows.local)),
          .gradient = static_cast<const float*>(tensors.gradient.const_data_ptr()) + rows.local,
          .exp_avg = moved(tensors.exp_avg, rows.local),
          .exp_avg_sq = moved(tensors.exp_avg_sq, rows.local),
          .step = static_cast<const float*>(tensors.step.const_data_ptr()),
          .rows = rows.count,
          .size = rows.size,
          .stride = rows.stride,
          .place = rows.place,
          .stream = tensors.stream};
}

template <class M>
void run_on_cpu(const AdamW& call) {
  parallel_for(0, call.list.chunks, /*grain=*/1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t number = begin; number < end; ++number) {
      const Chunk chunk = chunk_of(call.list, static_cast<std::int32_t>(number));
      const AdamWPiece& piece = call.list.pieces[chunk.piece];
      adamw_chunk<M>(piece, factors_of(call, piece), chunk, /*first=*/0, /*step=*/1);
    }
  });
}

struct AdamWLaunch {
  AdamW call{};
  std::vector<at::Tensor> read;
  std::vector<at::Tensor> written;

  void note(const AdamWTensors& each) {
    if (written.empty() || !written.back().is_same(each.exp_avg_sq)) {
      read.insert(read.end(), {each.gradient, each.parameter, each.exp_avg, each.exp_avg_sq});
      written.insert(written.end(), {each.parameter, each.exp_avg, each.exp_avg_sq});
    }
  }

  void run() {
    const at::Tensor& moments = written[1];
    if (has_cuda_kernels(written[0])) {
      run_cuda_kernel(call, "tessera::adamw", read, written, moments);
    } else if (!in_fake_mode()) {
      moments.scalar_type() == c10::ScalarType::Float ? run_on_cpu<float>(call)
                                                      : run_on_cpu<c10::BFloat16>(call);
    }
    call.list.count = call.list.chunks = 0;
    read.clear();
    written.clear();
  }
};

const double* number(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const double*>(tensor.const_data_ptr()) : nullptr;
}

}  // namespace

bool has_adamw_kernel(const at::Tensor& parameter) {
  return has_cuda_kernels(parameter) && parameter.scalar_type() == c10::ScalarType::Float;
}

void adamw(const std::vector<AdamWTensors>& tensors, const AdamWNumbers& numbers) {
  AdamWLaunch launch;
  launch.call.lr = number(numbers.lr);
  launch.call.gradient_factor = number(numbers.gradient_factor);
  launch.call.beta1 = numbers.beta1;
  launch.call.beta2 = numbers.beta2;
  launch.call.eps = numbers.eps;
  launch.call.weight_decay = numbers.weight_decay;
  launch.call.seed = numbers.seed;
  for (const AdamWTensors& each : tensors) {
    for (const PlacedRows& rows : rows_of(each)) {
      const AdamWPiece piece = piece_of(each, rows);
      if (piece.numel() == 0) {
        continue;
      }
      if (!launch.call.list.add(piece)) {
        launch.run();
        launch.call.list.add(piece);
      }
      launch.note(each);
    }
  }
  if (!launch.written.empty()) {
    launch.run();
  }
}

}  // namespace tessera::kernels
