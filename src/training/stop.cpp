#include "tessera/training/stop.h"

#include <array>
#include <cstdint>

namespace tessera::training {

bool stop_requested(bool own, const DeviceMesh& mesh) {
  std::array<std::uint8_t, 1> requested{static_cast<std::uint8_t>(own)};
  if (mesh.size() > 1) {
    mesh.flatten().group().any_rank(requested);
  }
  return requested[0] != 0;
}

}  // namespace tessera::training
