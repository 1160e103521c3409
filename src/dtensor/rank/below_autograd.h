#pragma once

#include "tessera/internals/detail/dispatch_keys.h"

namespace tessera::detail {

/// While it exists, operators on local tensors go straight to their backend: no autograd, no view
/// tracking, not to our own fallback (which a MetaDevice scope would otherwise include), and no
/// random numbers by the element (plain_random.cpp), which the call draws as a whole. For
/// work on local tensors in the course of a call: autograd has recorded the call on the wrappers
/// already, and a plain argument may require grad.
class BelowAutograd {
 public:
  BelowAutograd()
      : guard_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
               c10::DispatchKeySet({kDistributedKey, kRandomKey})) {}

 private:
  ExcludeKeys guard_;
};

/// While it exists, operators don't reach the library's fallback. For calls that pass through it:
/// autograd is not affected.
class BelowFallback {
 public:
  BelowFallback() : guard_(kDistributedKey) {}

 private:
  ExcludeKeys guard_;
};

}  // namespace tessera::detail
