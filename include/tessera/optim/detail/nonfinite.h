#pragma once

#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// Text that names the non-finite gradients: "rank 1 brought what is not finite to the reduction of
/// parameter 'head.bias'". For a parameter without FSDP, whose source rank is not known: "not
/// finite on rank 0 is that of parameter 'head.weight'". "" if all gradients are finite. FSDP saves
/// the smallest gradient of each unit from the step's last reduction for this text. The result is
/// the same on every rank. Collective like grad_norm(). Waits for the device, so call
/// describe_nonfinite() only for a step that has failed.
std::string describe_nonfinite(const std::vector<nn::SlotPtr>& parameters,
                               const NormOptions& options = {});

}  // namespace tessera::optim
TESSERA_API_END
