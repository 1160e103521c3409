#pragma once

#include "tessera/nn/parameter.h"

namespace tessera::nn {

/// Gradients of a module's parameters that lie elsewhere than in their .grad until they are
/// complete. Whoever keeps such attaches itself to the modules that own the slots, as a
/// KeptGradients.
class KeptGradients {
 public:
  virtual ~KeptGradients() = default;
  /// Forgets what was kept for `slot`.
  virtual void drop(const ParameterSlot& slot) = 0;
};

/// Drops the gradient of the parameter in `slot`, wherever parts of it lie.
void drop_gradient(const ParameterSlot& slot);

}  // namespace tessera::nn
