#pragma once

namespace tessera::nn {

/// While it lives, on this thread, new parameters and buffers are meta tensors: shapes and types
/// without storage. Scopes nest.
class MetaDevice {
 public:
  MetaDevice();
  ~MetaDevice();
  MetaDevice(const MetaDevice&) = delete;
  MetaDevice& operator=(const MetaDevice&) = delete;

  /// Whether this thread is inside a scope.
  static bool active();
};

}  // namespace tessera::nn
