#pragma once

#include <cstdint>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/internals/detail/threads.h"

TESSERA_API_BEGIN
namespace tessera {

/// While a StrictScope exists, implicit communication on this thread and in its backwards throws
/// Error. Implicit communication is a redistribution that the program did not request, or the
/// gather of an operator without a sharding rule. TESSERA_STRICT=1 does the same for the whole
/// process.
///
/// Allowed: item(), bool(), and the reduction of a leaf's gradient to the leaf's layout.
class StrictScope {
 public:
  explicit StrictScope(bool strict = true) : scope_(strict) {}

 private:
  detail::CarriedScope<detail::Carried::kStrict, bool> scope_;
};

/// While a ReplicationScope exists, operators on this thread that combine plain and distributed
/// tensors treat plain tensors as replicated. The caller guarantees equal plain tensors on all
/// ranks; TESSERA_DEBUG=1 compares the values. The gradients of plain tensors are plain and already
/// reduced. Outside of the scope such operators throw Error, except in the forward of a
/// parallelized module and in libtorch's gradient formulas. Like PyTorch's implicit_replication.
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
