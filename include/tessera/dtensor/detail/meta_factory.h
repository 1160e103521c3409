#pragma once

#include "tessera/internals/detail/dispatch_keys.h"

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// During the scope, factory functions on this thread that are called without a device make meta
/// tensors. Implements nn::MetaDevice. Scopes nest.
class MetaFactoryGuard {
 public:
  MetaFactoryGuard();
  ~MetaFactoryGuard();
  MetaFactoryGuard(const MetaFactoryGuard&) = delete;
  MetaFactoryGuard& operator=(const MetaFactoryGuard&) = delete;

 private:
  bool outer_;
  /// Guard that includes a dispatch key on this thread, so that operators without distributed
  /// tensors reach the library's fallback too.
  IncludeKeys guard_;
};

/// Whether this thread is inside a MetaFactoryGuard scope.
bool makes_meta_tensors();

}  // namespace tessera::detail
TESSERA_API_END
