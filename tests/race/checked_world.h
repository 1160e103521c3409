// A world of ranks whose collectives, streams and operators the checker sees.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "race/checker.h"
#include "race/operator_watch.h"
#include "tessera/comm/streams.h"
#include "tessera/comm/world.h"
#include "tessera/nn/module.h"
#include "testing/memory/watched_allocator.h"
#include "testing/ranks.h"

namespace tessera::race {

/// Where in the code a lane is made to wait: the function that calls wait() or order(), and which
/// lanes: "tessera::fsdp::CommContext::settle: compute after reduce_scatter".
using Site = std::string;

/// Lanes that do nothing but tell a checker what was asked of them. The waits of one site of the
/// code can be left out, as if that line were missing.
class CheckedStreams final : public comm::Streams {
 public:
  explicit CheckedStreams(RaceChecker& checker, Site left_out = {})
      : checker_(&checker), left_out_(std::move(left_out)) {}

  comm::StreamEventPtr record(comm::Lane lane) override;
  void wait(comm::Lane lane, const comm::StreamEventPtr& event) override;
  void synchronize(const comm::StreamEventPtr& event) override;
  void note(const std::string& what) override { checker_->note(what); }

  /// Those that were called.
  const std::set<Site>& sites() const { return sites_; }

 private:
  void enter(comm::Lane lane) override { checker_->enter(lane); }
  void leave() override { checker_->enter(comm::Lane::kCompute); }
  bool is_left_out(const Site& site);

  RaceChecker* checker_;
  Site left_out_;
  std::set<Site> sites_;
};

/// A rank under the checker, from construction on. One a thread; models and meshes go before it.
class CheckedRank {
 public:
  explicit CheckedRank(const Rank& rank, Site left_out = {}, Costs costs = {});
  CheckedRank(const CheckedRank&) = delete;
  CheckedRank& operator=(const CheckedRank&) = delete;
  ~CheckedRank();

  const Rank& rank() const { return rank_; }
  /// Its collectives are looked at.
  DeviceMesh mesh(std::vector<std::int64_t> sizes, std::vector<std::string> names) const;
  /// The unit of `root`, and those that its first forward finds below it, use lanes from now on.
  void watch(const nn::ModuleBase& root);

  RaceChecker& checker() { return *checker_; }
  CheckedStreams& streams() { return *streams_; }

 private:
  Rank rank_;
  std::shared_ptr<RaceChecker> checker_;
  std::shared_ptr<CheckedStreams> streams_;
  comm::WorldPtr world_;
  std::unique_ptr<OperatorWatch> operators_;
  testing::AllocationScope allocations_;
};

/// A rank's world whose collectives tell a checker what they read and write, from their call until
/// they are waited for. The checker must outlive it.
comm::WorldPtr checked_world(const comm::WorldPtr& world, RaceChecker& checker);

}  // namespace tessera::race
