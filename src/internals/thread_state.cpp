#include "tessera/internals/detail/threads.h"

#include <ATen/autocast_mode.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

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

bool autocasts(c10::DeviceType device) {
  // The check comes first, because libtorch throws for a device without autocast, such as the meta
  // device.
  return std::ranges::find(kCastDevices, device) != kCastDevices.end() &&
         at::autocast::is_autocast_enabled(device);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

c10::DebugInfoKind kind_of(Carried what) {
  constexpr int kFirst = 128;  // first of the library's kinds; libtorch's own kinds count from 0
  return static_cast<c10::DebugInfoKind>(kFirst + static_cast<int>(what));
}

#else

c10::DebugInfoKind kind_of(Carried what) {
  static constexpr std::array<std::string_view, 5> kNames{
      "tessera::Strict", "tessera::OperatorMode", "tessera::RandomRegion", "tessera::PhaseRecorder",
      "tessera::MemoryScope"};
  return c10::DebugInfoKind(&kNames[static_cast<std::size_t>(what)]);
}

#endif

}  // namespace tessera::detail
