#pragma once

#include "tessera/core/detail/no_copy.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// While a MetaDevice object exists, this thread creates new parameters on the meta device: sizes
/// and types without storage. Factory functions that are called without a device also create
/// tensors on the meta device. Scopes may nest. torch.device("meta").
class MetaDevice : tessera::detail::NoCopy {
 public:
  /// Whether this thread is inside the scope of a MetaDevice object.
  static bool active() { return tessera::detail::makes_meta_tensors(); }

 private:
  tessera::detail::MetaFactoryGuard factories_;
};

}  // namespace tessera::nn
TESSERA_API_END
