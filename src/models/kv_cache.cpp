// Position p is in slot p mod slots: without a window there are as many slots as positions, and
// with one the slots are a ring. Attention needs no order, since keys are turned by their positions
// before they come here.

#include "tessera/models/kv_cache.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/new_empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::models {

KvCache::KvCache(std::int64_t positions, std::int64_t window, std::vector<std::int64_t> padding)
    : positions_(positions),
      slots_(window > 0 ? std::min(positions, window) : positions),
      padding_(std::move(padding)) {
  TESSERA_CHECK(positions > 0 && !padding_.empty(), "a cache of ", positions, " positions for ",
                padding_.size(), " texts was asked for; it needs one of each at least");
}

bool KvCache::padded() const {
  return std::ranges::any_of(padding_, [](std::int64_t count) { return count > 0; });
}

KvCache::Layer KvCache::append(std::size_t layer, const at::Tensor& keys,
                               const at::Tensor& values) {
  const Layer& kept = layer_like(layer, keys);
  write(kept.keys, keys);
  write(kept.values, values);
  if (tokens_ == 0) {
    return {keys, values};
  }
  const std::int64_t filled = std::min(tokens_ + 1, slots_);
  return {kept.keys.narrow(2, 0, filled), kept.values.narrow(2, 0, filled)};
}

/// Made by the first call, which knows how many of the heads this rank has, and their type.
KvCache::Layer& KvCache::layer_like(std::size_t layer, const at::Tensor& keys) {
  if (layer >= layers_.size()) {
    layers_.resize(layer + 1);
  }
  Layer& kept = layers_[layer];
  if (!kept.keys.defined()) {
    const std::vector<std::int64_t> sizes{keys.size(0), keys.size(1), slots_, keys.size(3)};
    kept = {keys.new_empty(sizes), keys.new_empty(sizes)};  // distributed as the keys are
  }
  return kept;
}

/// `values`: of the positions that follow. Of more than there are slots the last ones are kept.
void KvCache::write(const at::Tensor& slots, const at::Tensor& values) const {
  const std::int64_t count = std::min(values.size(2), slots_);
  const std::int64_t skipped = values.size(2) - count;
  const std::int64_t begin = (tokens_ + skipped) % slots_;
  const std::int64_t before_end = std::min(count, slots_ - begin);
  slots.narrow(2, begin, before_end).copy_(values.narrow(2, skipped, before_end));
  if (before_end < count) {
    slots.narrow(2, 0, count - before_end)
        .copy_(values.narrow(2, skipped + before_end, count - before_end));
  }
}

at::Tensor KvCache::mask(c10::Device device) const {
  const std::int64_t filled = std::min(tokens_ + 1, slots_);
  // The oldest position that is kept, once this one is.
  if (*std::ranges::max_element(padding_) <= tokens_ + 1 - filled) {
    return {};
  }
  const auto integers = at::dtype(c10::kLong).device(device);
  const at::Tensor slot = at::arange(filled, integers);
  const at::Tensor position = tokens_ - (tokens_ - slot).remainder(slots_);
  const at::Tensor first = at::tensor(padding_, at::dtype(c10::kLong)).to(device);
  return position.ge(first.unsqueeze(1)).unsqueeze(1).unsqueeze(1);
}

}  // namespace tessera::models
