// Makes worlds whose ranks report their collectives, streams and operators to a race checker.
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

/// Names a place where a stream waits for another: the function that calls wait() or order(), and
/// both streams, as in "tessera::fsdp::CommContext::settle: compute after reduce_scatter".
using Site = std::string;

/// Simulated streams that report events and waits to a RaceChecker. Waits named `left_out` are not
/// reported, as if the library had no such wait.
class CheckedStreams final : public comm::Streams {
 public:
  explicit CheckedStreams(RaceChecker& checker, Site left_out = {})
      : checker_(&checker), left_out_(std::move(left_out)) {}

  comm::StreamEventPtr record(comm::Lane lane) override;
  void wait(comm::Lane lane, const comm::StreamEventPtr& event) override;
  void synchronize(const comm::StreamEventPtr& event) override;
  void note(const std::string& what) override { checker_->note(what); }

  const std::set<Site>& sites() const { return sites_; }

 private:
  void enter(comm::Lane lane) override { checker_->enter(lane); }
  void leave() override { checker_->enter(comm::Lane::kCompute); }
  bool is_left_out(const Site& site);

  RaceChecker* checker_;
  Site left_out_;
  std::set<Site> sites_;
};

/// A rank whose memory accesses are checked. Construct a CheckedRank before models and meshes.
class CheckedRank {
 public:
  explicit CheckedRank(const Rank& rank, Site left_out = {});
  CheckedRank(const CheckedRank&) = delete;
  CheckedRank& operator=(const CheckedRank&) = delete;
  ~CheckedRank();

  const Rank& rank() const { return rank_; }
  DeviceMesh mesh(std::vector<std::int64_t> sizes, std::vector<std::string> names) const;
  /// Makes all FSDP units of `root` and its submodules use this rank's CheckedStreams.
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

/// Wraps `world`, so that each collective is reported to `checker`: the memory that it accesses,
/// its start and its wait. `checker` must outlive the returned world.
comm::WorldPtr checked_world(const comm::WorldPtr& world, RaceChecker& checker);

}  // namespace tessera::race
