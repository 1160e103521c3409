#include "tessera/internals/detail/carried_slot.h"

#include <torch/version.h>

#include <array>
#include <cstddef>
#include <string_view>

namespace tessera::detail {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

c10::DebugInfoKind kind_of(Carried what) {
  constexpr int kFirst = 128;  // libtorch's own kinds count from 0
  return static_cast<c10::DebugInfoKind>(kFirst + static_cast<int>(what));
}

#else

c10::DebugInfoKind kind_of(Carried what) {
  static constexpr std::array<std::string_view, 6> kNames{
      "tessera::Strict",        "tessera::OperatorMode", "tessera::RandomRegion",
      "tessera::PhaseRecorder", "tessera::MemoryScope",  "tessera::ModuleWatch"};
  return c10::DebugInfoKind(&kNames[static_cast<std::size_t>(what)]);
}

#endif

}  // namespace tessera::detail
