// A world of ranks whose collectives, streams and operators are reported to a checker.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "race/checker.h"
#include "race/operator_watch.h"
#include "tessera/comm/detail/streams.h"
#include "tessera/comm/world.h"
#include "tessera/nn/module.h"
#include "testing/memory.h"
#include "testing/ranks.h"

namespace tessera::race {

/// A place in the code where a lane waits: the function that calls wait() or order(), and the
/// lanes, like "tessera::fsdp::CommContext::settle: compute after reduce_scatter".
using Site = std::string;

/// Lanes that only report their calls to a checker. The waits of one place in the code can be left
/// out, as if the line were missing.
class CheckedStreams final : public comm::Streams {
 public:
  explicit CheckedStreams(RaceChecker& checker, Site left_out = {})
      : checker_(&checker), left_out_(std::move(left_out)) {}

  comm::StreamEventPtr record(comm::Lane lane) override;
  void wait(comm::Lane lane, const comm::StreamEventPtr& event) override;
  void synchronize(const comm::StreamEventPtr& event) override;
  void note(const std::string& what) override { checker_->note(what); }

  /// The places that were reached.
  const std::set<Site>& sites() const { return sites_; }

 private:
  void enter(comm::Lane lane) override { checker_->enter(lane); }
  void leave() override { checker_->enter(comm::Lane::kCompute); }
  bool is_left_out(const Site& site);

  RaceChecker* checker_;
  Site left_out_;
  std::set<Site> sites_;
};

/// Puts a rank under the checker while it exists. One per thread; construct it before models and
/// meshes.
class CheckedRank {
 public:
  explicit CheckedRank(const Rank& rank, Site left_out = {});
  CheckedRank(const CheckedRank&) = delete;
  CheckedRank& operator=(const CheckedRank&) = delete;
  ~CheckedRank();

  const Rank& rank() const { return rank_; }
  /// Its collectives are looked at.
  DeviceMesh mesh(std::vector<std::int64_t> sizes, std::vector<std::string> names) const;
  /// From now on the FSDP unit of `root` and the units that its first forward finds below it use
  /// checked lanes.
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

/// A rank's world whose collectives tell a checker what they read and write, from the call until
/// the wait. The checker must outlive it.
comm::WorldPtr checked_world(const comm::WorldPtr& world, RaceChecker& checker);

}  // namespace tessera::race
