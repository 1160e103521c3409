// Every rank is the one rank of the reference: it runs that by itself, with its own samples, and so
// nothing of the reference's run goes between ranks but the mean of the gradients.

#include "tessera/observe/verify.h"

#include <algorithm>
#include <cstdint>
#include <exception>

#include "tessera/comm/detail/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/detail/batch_ranks.h"
#include "verify/judge.h"
#include "verify/same_start.h"
#include "verify/seen_run.h"

namespace tessera::observe {
namespace {

/// How far in front of those that the program has drawn: where FSDP sees that the counts have not
/// changed between two forwards it takes the model for one that draws nothing.
constexpr std::uint64_t kAhead = std::uint64_t{1} << 32;

class Verification {
 public:
  Verification(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh,
               const VerifyStep& step, const VerifyOptions& options)
      : module_(module), reference_(reference), mesh_(mesh), step_(step), options_(options) {}

  VerifyReport run();

 private:
  /// Throws on every rank what `work`, which must not communicate, throws on one.
  template <class Work>
  void on_each_rank(const Work& work) const {
    comm::Communicator& group = flush_pending_transfers(mesh_.group_of_all_ranks());
    if (const auto failure = comm::first_failure(group, mesh_.device(), work)) {
      fail(failure->message);
    }
  }
  /// Empty: they are.
  std::string whether_weights_are_equal() const;
  void run_reference();
  SeenRun run_on_mesh();
  BatchPart part_of_batch() const;

  nn::ModuleBase& module_;
  nn::ModuleBase& reference_;
  const DeviceMesh& mesh_;
  const VerifyStep& step_;
  const VerifyOptions& options_;
  DrawCounts counts_;
  bool draws_ = false;
  SeenRun one_rank_;
  Noise noise_;
};

BatchPart Verification::part_of_batch() const {
  if (options_.batch_dims.empty()) {
    return {0, 1};
  }
  const DeviceMesh batches = mesh_.slice(options_.batch_dims).flatten();
  return {batches.local_rank(), batches.size()};
}

std::string Verification::whether_weights_are_equal() const {
  std::vector<tessera::detail::Replica> copies;
  for (const auto& [fqn, slot] : reference_.named_slots()) {
    copies.push_back({"parameter '" + fqn + "'", slot->get().detach()});
  }
  try {
    tessera::detail::check_replicas(tessera::detail::peers_of(mesh_), copies,
                                    tessera::detail::Equality::kBitwise, "verify",
                                    "give every rank the same values");
    return {};
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    return error.what();
  }
}

void Verification::run_reference() {
  // What the loss learns from a forward of several ranks is not so of this one.
  const std::int64_t batch_ranks = nn::batch_ranks();
  nn::set_batch_ranks(1);
  const auto run = [&] {
    set_draw_counts(reference_, counts_, kAhead);
    const BatchPart part = part_of_batch();
    return run_step(reference_, step_);
  };
  on_each_rank([&] {
    try {
      one_rank_ = run();
      draws_ = have_drawn(draw_counts(reference_), counts_, kAhead);
    } catch (const Error& error) {
      fail("verify: with the reference, ", error.what());
    }
    for (std::uint64_t draw = 0; draw < 2; ++draw) {
      change_last_places(reference_, draw);
      raise_noise(noise_, one_rank_, run());
    }
  });
  nn::set_batch_ranks(batch_ranks);
}

SeenRun Verification::run_on_mesh() {
  try {
    set_draw_counts(module_, counts_, draws_ ? kAhead : 0);
    const BatchPart part = part_of_batch();
    return run_step(module_, step_);
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail("verify: on the mesh, ", error.what());
  }
}

VerifyReport Verification::run() {
  on_each_rank([&] { check_reference(module_, reference_); });
  copy_to_reference(module_, reference_, mesh_);
  if (std::string weights = whether_weights_are_equal(); !weights.empty()) {
    return {.weights = std::move(weights)};
  }
  counts_ = draw_counts(module_);
  run_reference();
  SeenRun on_mesh;
  {
    const StateAside aside(module_);
    on_mesh = run_on_mesh();
  }
  set_draw_counts(module_, counts_);
  return judge(on_mesh, std::move(one_rank_), noise_, mesh_, options_);
}

}  // namespace

VerifyReport verify(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh,
                    const VerifyStep& step, const VerifyOptions& options) {
  return Verification(module, reference, mesh, step, options).run();
}

}  // namespace tessera::observe
