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
  /// Includes the dispatch key that sends operators without distributed tensors to the fallback,
  /// too.
  IncludeKeys guard_;
};

/// Whether this thread is inside a MetaFactoryGuard scope.
bool makes_meta_tensors();

}  // namespace tessera::detail
TESSERA_API_END
