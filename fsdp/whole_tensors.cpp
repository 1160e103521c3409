#include "whole_tensors.h"

namespace tessera::fsdp {
namespace {

/// Tensors begin at multiples of this many bytes, as kernels like it.
constexpr std::int64_t kAlignment = 64;

std::int64_t round_up(std::int64_t bytes, std::int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

WholeTensors::WholeTensors(const std::vector<Segment>& segments, c10::ScalarType dtype,
                           c10::Device device, bool padded, std::int64_t pieces) {
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(dtype));
  std::vector<std::int64_t> numels;
  std::int64_t bytes = 0;
  for (const Segment& segment : segments) {
    numels.push_back(padded ? segment.shape.ranks * segment.shape.padded_numel()
                            : c10::multiply_integers(segment.shape.sizes));
    bytes += round_up(itemsize * numels.back(), kAlignment);
  }
  bytes = round_up(bytes, kAlignment * pieces);
  storage_ = ReusableStorage(bytes, device);
  flat_ = storage_.tensor({bytes / itemsize}, dtype, 0);
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    tensors_.push_back(storage_.tensor(segments[i].shape.sizes, dtype, offset));
    if (padded) {
      padded_.push_back(storage_.tensor({numels[i]}, dtype, offset));
    }
    offset += round_up(itemsize * numels[i], kAlignment);
  }
}

}  // namespace tessera::fsdp
