#include "tessera/internals/detail/autocast_state.h"

#include <ATen/autocast_mode.h>

#include <cstddef>

namespace tessera::detail {
namespace {

constexpr std::array kCastDevices{c10::kCPU, c10::kCUDA};

}  // namespace

AutocastState autocast_state() {
  return {{at::autocast::get_autocast_dtype(kCastDevices[0]),
           at::autocast::get_autocast_dtype(kCastDevices[1])},
          at::autocast::is_autocast_cache_enabled()};
}

void set_autocast_state(const AutocastState& state) {
  for (std::size_t i = 0; i < kCastDevices.size(); ++i) {
    at::autocast::set_autocast_dtype(kCastDevices[i], state.types[i]);
  }
  at::autocast::set_autocast_cache_enabled(state.keeps_casts);
}

}  // namespace tessera::detail
