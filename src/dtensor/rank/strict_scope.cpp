// The scopes that decide which calls are allowed; plan/policy.cpp checks them at each call.

#include "tessera/dtensor/strict_scope.h"

#include <utility>

#include "rank/rank_state.h"
#include "rank/rank_thread.h"
#include "tessera/internals/detail/backward.h"

namespace tessera {

bool is_strict() {
  const bool* scope = detail::CarriedScope<detail::Carried::kStrict, bool>::active();
  return scope != nullptr ? *scope : detail::RankState::here()->strict.load();
}

// The state is the thread's: ranks may be threads, and each has its own scopes. A backward asks for
// none of it.
ReplicationScope::ReplicationScope(bool replicate)
    : outer_(std::exchange(detail::RankThread::here().replicates, replicate)) {}
ReplicationScope::~ReplicationScope() {
  detail::RankThread::here().replicates = outer_;
}

// Gradient formulas make plain tensors of numbers that all ranks have. Plain tensors of the
// program's hooks or functions are the program's.
bool plain_tensors_are_replicated() {
  return detail::RankThread::here().replicates ||
         detail::backward_code() == detail::BackwardCode::kFormula;
}

std::int64_t implicit_redistributions() {
  return detail::RankState::here()->implicit_redistributions;
}

}  // namespace tessera
