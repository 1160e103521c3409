#pragma once

#include "tessera/dtensor/detail/meta_factory.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// While a MetaDevice object exists, this thread creates new parameters on the meta device: sizes
/// and types without storage. The same applies to tensors from factory functions that are called
/// without a device. Scopes nest. torch.device("meta").
class MetaDevice {
 public:
  MetaDevice() = default;
  MetaDevice(const MetaDevice&) = delete;
  MetaDevice& operator=(const MetaDevice&) = delete;

  /// Whether this thread is inside a scope.
  static bool active() { return tessera::detail::makes_meta_tensors(); }

 private:
  tessera::detail::MetaFactoryGuard factories_;
};

}  // namespace tessera::nn
TESSERA_API_END
