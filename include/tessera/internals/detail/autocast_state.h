// What autocast computes in, beside the dispatch key that turns it on (key_scopes.h): the types by
// device, and whether casts of weights are kept. Public is torch.autocast, in Python.
//
// No version differs.
//
// Canary: AutocastStateCanary.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Autocast on the two devices that the library computes on, the CPU and CUDA.
struct AutocastState {
  std::array<c10::ScalarType, 2> types;
  bool keeps_casts = true;
};

AutocastState autocast_state();
void set_autocast_state(const AutocastState& state);
/// Whether operators on tensors of such devices are cast on this thread.
bool autocasts(c10::DeviceType device);

}  // namespace tessera::detail
TESSERA_API_END
