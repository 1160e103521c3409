#pragma once

#include <cstdint>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/internals/detail/threads.h"

TESSERA_API_BEGIN
namespace tessera {

/// While a StrictScope exists, implicit communication on this thread throws Error. Implicit
/// communication is a redistribution that the program did not request, or the gather of an operator
/// without a sharding rule. TESSERA_STRICT=1 in the environment does the same for the whole
/// process. On all threads of autograd, a backward uses the scope of the thread that called
/// backward().
///
/// Two kinds of communication are allowed in the scope: item() and bool(), which read one value,
/// and the reduction of a leaf's gradient to the layout of the leaf.
class StrictScope {
 public:
  explicit StrictScope(bool strict = true) : scope_(strict) {}

 private:
  detail::CarriedScope<detail::Carried::kStrict, bool> scope_;
};

/// While a ReplicationScope exists, an operator on this thread that combines plain and distributed
/// tensors treats the plain tensors as replicated. The caller guarantees that each plain tensor is
/// equal on all ranks; TESSERA_DEBUG=1 compares the values. The gradients of plain tensors are
/// plain tensors, already reduced over all ranks. Outside of the scope, such an operator throws
/// Error, except in the forward of a parallelized module and in libtorch's gradient formulas. Two
/// kinds of plain tensors need no scope, because ranks compare their values at each call:
/// single-element tensors without gradient, and all plain tensors in hooks and functions that the
/// program adds to a backward. Like PyTorch's implicit_replication.
class ReplicationScope : tessera::detail::NoCopy {
 public:
  explicit ReplicationScope(bool replicate = true);
  ~ReplicationScope();

 private:
  bool outer_;
};

/// Returns the number of implicit redistributions of this thread and of its backwards. A
/// redistribution is implicit if an operator needs an argument in another layout.
std::int64_t implicit_redistributions();

}  // namespace tessera
TESSERA_API_END
