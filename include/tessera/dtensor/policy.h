#pragma once

#include <cstdint>

namespace tessera {

/// While it lives, on this thread: an operator without a sharding rule, and a redistribution that
/// nobody wrote, throw Error instead of gathering with a warning. TESSERA_STRICT=1 does the same
/// for the whole process. Backward runs under the scope that is active when backward() is called.
///
/// Allowed all the same: item() and bool(), which ask for the one value; and the reduction of a
/// leaf's gradient to the leaf's own layout.
class StrictScope {
 public:
  explicit StrictScope(bool strict = true);
  ~StrictScope();
  StrictScope(const StrictScope&) = delete;
  StrictScope& operator=(const StrictScope&) = delete;

 private:
  bool outer_;
};

bool is_strict();

/// While it lives, on this thread: plain tensors that meet distributed ones in an operator count as
/// replicated. The caller vouches that they are equal on all ranks (TESSERA_DEBUG=1 has their
/// values compared). Without it that is an Error, except for tensors of one element and inside
/// backward.
class ReplicationScope {
 public:
  explicit ReplicationScope(bool replicate = true);
  ~ReplicationScope();
  ReplicationScope(const ReplicationScope&) = delete;
  ReplicationScope& operator=(const ReplicationScope&) = delete;

 private:
  bool outer_;
};

bool plain_tensors_are_replicated();

/// How many times this thread redistributed a tensor because an operator needed it otherwise.
std::int64_t implicit_redistributions();

}  // namespace tessera
