#pragma once

#include "tessera/internals/detail/dispatch_keys.h"

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// While it exists, factory functions on this thread that name no device make meta tensors. The
/// implementation of nn::MetaDevice. Scopes nest.
class MetaFactoryGuard {
 public:
  MetaFactoryGuard();
  ~MetaFactoryGuard();
  MetaFactoryGuard(const MetaFactoryGuard&) = delete;
  MetaFactoryGuard& operator=(const MetaFactoryGuard&) = delete;

 private:
  bool outer_;
  /// Sends operators without distributed tensors to the fallback as well.
  IncludeKeys guard_;
};

/// Whether this thread is inside such a scope.
bool makes_meta_tensors();

}  // namespace tessera::detail
TESSERA_API_END
