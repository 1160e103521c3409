// The training data of vit_train: images of stripes, whose direction is the label. The images are
// computed from integers, so that other implementations can produce the same bits.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <cstdint>

#include "examples/vit/vit.h"

namespace vit {

/// A rank's images and labels of one step.
struct Images {
  at::Tensor pixels;  ///< (rows, channels, height, width), fp32, in [-1, 1)
  at::Tensor labels;  ///< (rows), int64
};

/// The rows of rank `rank` of `ranks` in step `step` (from 0) of an endless data set.
inline Images stripes(const Config& c, std::int64_t step, std::int64_t batch, std::int64_t rank,
                      std::int64_t ranks) {
  const at::Tensor sample =
      step * batch + at::arange(batch * rank / ranks, batch * (rank + 1) / ranks);
  const at::Tensor hash = (sample * 2654435761 + 12345).remainder(1LL << 32);
  const at::Tensor label = hash.floor_divide(256).remainder(c.classes);
  const at::Tensor position = at::arange(c.image_size), channel = at::arange(c.channels);
  const auto of_sample = [](const at::Tensor& x) { return x.view({-1, 1, 1, 1}); };
  const at::Tensor phase = of_sample(label.remainder(3)) * position.view({-1, 1}) +
                           of_sample(label.floor_divide(3)) * position +
                           of_sample(hash.remainder(8)) + channel.view({-1, 1, 1});
  return {phase.remainder(8).to(at::kFloat) / 4 - 1, label};
}

}  // namespace vit
