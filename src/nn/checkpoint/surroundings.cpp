#include "surroundings.h"

#include <ATen/autocast_mode.h>

namespace tessera::nn::detail {
namespace {

constexpr std::array kCastDevices{c10::kCPU, c10::kCUDA};

std::array<c10::ScalarType, 2> cast_types() {
  return {at::autocast::get_autocast_dtype(kCastDevices[0]),
          at::autocast::get_autocast_dtype(kCastDevices[1])};
}

void set_cast_types(const std::array<c10::ScalarType, 2>& types) {
  for (std::size_t i = 0; i < types.size(); ++i) {
    at::autocast::set_autocast_dtype(kCastDevices[i], types[i]);
  }
}

}  // namespace

Surroundings::Surroundings(std::span<at::Tensor* const> inputs, bool with_random_state)
    : keys_(c10::impl::tls_local_dispatch_key_set()),
      strict_(is_strict()),
      replicates_plain_(plain_tensors_are_replicated()),
      batch_part_(BatchPart::first_element(1)),
      cast_types_(cast_types()) {
  if (with_random_state) random_.emplace(inputs);
}

void Surroundings::settle() {
  if (random_) random_->forget_unmoved();
}

Surroundings::Restored::Restored(const Surroundings& then)
    : grad_mode_(true),
      keys_(then.keys_),
      strict_(then.strict_),
      replication_(then.replicates_plain_),
      batch_part_(then.batch_part_, then.batch_part_ + 1),
      cast_types_(cast_types()),
      cast_cache_(at::autocast::is_autocast_cache_enabled()) {
  set_cast_types(then.cast_types_);
  // Nobody would clear it before the optimizer changes the weights whose casts it keeps.
  at::autocast::set_autocast_cache_enabled(false);
  if (then.random_) {
    random_.emplace(then.random_->retaken());
    then.random_->restore();
  }
}

Surroundings::Restored::~Restored() {
  if (random_) random_->restore();
  at::autocast::set_autocast_cache_enabled(cast_cache_);
  set_cast_types(cast_types_);
}

}  // namespace tessera::nn::detail
