#pragma once

#include "tessera/dtensor/meta_factory.h"

namespace tessera::nn {

/// While it lives, on this thread, factory functions that name no device and new parameters make
/// meta tensors: shapes and types without storage. Scopes nest.
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
