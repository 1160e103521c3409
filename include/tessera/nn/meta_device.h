#pragma once

#include "tessera/dtensor/detail/meta_factory.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// While it lives, new parameters of this thread, and tensors of factory functions that are given
/// no device, are on the meta device: sizes and types without storage. Scopes nest.
/// torch.device("meta").
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
