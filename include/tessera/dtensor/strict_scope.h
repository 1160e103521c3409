#pragma once

#include <cstdint>

#include "tessera/export.h"
#include "tessera/internals/detail/threads.h"

TESSERA_API_BEGIN
namespace tessera {

/// During this scope, implicit communication on this thread throws Error: an implicit
/// redistribution, and an operator without a sharding rule, which otherwise gathers with a warning.
/// TESSERA_STRICT=1 does the same for the process. Backward runs under the scope that is active
/// when backward() is called, whichever thread of autograd runs it.
///
/// Still allowed: item() and bool(), which read one value, and the reduction of a leaf's gradient
/// to the layout of the leaf.
class StrictScope {
 public:
  explicit StrictScope(bool strict = true) : scope_(strict) {}

 private:
  detail::CarriedScope<detail::Carried::kStrict, bool> scope_;
};

/// Whether implicit communication is refused on this thread.
bool is_strict();

/// During this scope, plain tensors that an operator combines with distributed ones on this thread
/// count as replicated. The caller guarantees that they are equal on all ranks; TESSERA_DEBUG=1
/// compares their values. Their gradients are plain and whole. Without the scope such an argument
/// is an Error, except in the forward of a parallelized module and in libtorch's gradient formulas.
/// Two kinds of plain tensors are compared at each call instead: single-element tensors without
/// gradient, and all plain tensors in hooks and functions that the program adds to a backward.
/// PyTorch's implicit_replication.
class ReplicationScope {
 public:
  explicit ReplicationScope(bool replicate = true);
  ~ReplicationScope();
  ReplicationScope(const ReplicationScope&) = delete;
  ReplicationScope& operator=(const ReplicationScope&) = delete;

 private:
  bool outer_;
};

/// Whether a ReplicationScope is active on this thread, or libtorch computes a gradient formula;
/// false where a hook or a function of the program may run instead.
bool plain_tensors_are_replicated();

/// How often this thread, or a backward of its results, has redistributed an argument because an
/// operator needed another layout.
std::int64_t implicit_redistributions();

}  // namespace tessera
TESSERA_API_END
