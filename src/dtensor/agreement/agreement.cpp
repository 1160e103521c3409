// How the ranks of a mesh compare data, or share a verdict, apart from the collectives that the
// program asked for. Everything uses the group of the whole mesh, and first waits for transfers
// under way, as every collective that is waited for at once does.

#include "agreement/agreement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "rank/below_autograd.h"
#include "rank/rank_thread.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/trace.h"
#include "tessera/core/detail/environment_switch.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"
#include "tessera/dtensor/detail/module_names.h"
#include "tessera/dtensor/detail/replica_agreement.h"

namespace tessera {

// Reads the environment at each call, which is little beside making a tensor.
bool detail::checks_agreement() {
#ifdef NDEBUG
  constexpr bool kDefault = false;
#else
  constexpr bool kDefault = true;
#endif
  return debug_checks(kDefault);
}

bool detail::checks_calls() {
  return RankThread::here().checks_calls;
}

// The flag is all-reduced as a tensor of libtorch's: below autograd, so that no mode sees it.
bool detail::any_rank(const DeviceMesh& mesh, bool own) {
  const BelowAutograd guard;
  return comm::any_rank(flush_pending_transfers(mesh.group_of_all_ranks()), mesh.device(), own);
}

void detail::run_or_fail_together(const DeviceMesh& mesh, std::string_view what,
                                  const std::function<void()>& work) {
  const auto failure =
      comm::first_failure(flush_pending_transfers(mesh.group_of_all_ranks()), mesh.device(), work);
  if (failure) {
    fail(what, " failed on rank ", mesh.ranks()[static_cast<std::size_t>(failure->rank)],
         ", for the values of its part: ", failure->message,
         "; correct those (an index out of range?)");
  }
}

void detail::check_replicated(const DeviceMesh& mesh, std::string_view what,
                              const std::vector<at::Tensor>& tensors) {
  std::vector<Replica> replicas;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    replicas.push_back({fmt::format("plain tensor {}", i), tensors[i]});
  }
  check_replicas(
      peers_of(mesh), replicas, Equality::kBitwise,
      fmt::format("{}{} takes plain tensors for the same on every rank", what, in_module()),
      "make them equal on all ranks, distribute them, or make the distributed ones plain "
      "(DistributedTensor(x).full_tensor())");
}

}  // namespace tessera
