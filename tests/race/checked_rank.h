#pragma once

#include <memory>
#include <string>
#include <vector>

#include "race/checked_streams.h"
#include "race/checker/race_checker.h"
#include "race/operator_watch.h"
#include "tessera/nn/module.h"
#include "testing/memory/watched_allocator.h"
#include "testing/ranks.h"

namespace tessera::race {

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

}  // namespace tessera::race
