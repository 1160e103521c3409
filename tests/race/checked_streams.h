#pragma once

#include <memory>
#include <set>
#include <string>

#include "race/checker/race_checker.h"
#include "tessera/comm/streams.h"

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

}  // namespace tessera::race
