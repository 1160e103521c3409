#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::detail {

/// While it lives, operators on local tensors go straight to their backend: no autograd, no view
/// tracking, and not to our own fallback (which a MetaDevice scope would otherwise include).
class BelowAutograd {
 public:
  BelowAutograd()
      : guard_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
               c10::DispatchKeySet(c10::DispatchKey::Fake)) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

/// While it lives, operators don't go to our own fallback.
class BelowFallback {
 public:
  BelowFallback() : guard_(c10::DispatchKeySet(c10::DispatchKey::Fake)) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace tessera::detail
