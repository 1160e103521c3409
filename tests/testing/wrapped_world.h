#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/world.h"

namespace tessera::testing {

/// A rank's world in which a test replaces groups by wrapped ones. Meshes can be made on it. Used
/// by one thread at a time.
class WrappedWorld final : public comm::World {
 public:
  /// Returns the replacement for the group of this name.
  using Wrap =
      std::function<comm::CommunicatorPtr(comm::CommunicatorPtr group, const std::string& name)>;

  WrappedWorld(comm::WorldPtr inner, Wrap wrap)
      : inner_(std::move(inner)), wrap_(std::move(wrap)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int local_rank() const override { return inner_->local_rank(); }
  const comm::WorldOptions& options() const override { return inner_->options(); }
  comm::TrafficCounter& traffic() override { return inner_->traffic(); }
  comm::CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) override {
    comm::CommunicatorPtr& known = groups_[{ranks, name}];
    if (known == nullptr) {
      known = wrap_(inner_->group(ranks, name), name);
    }
    return known;
  }
  void abort() override { inner_->abort(); }
  int device_index() const override { return inner_->device_index(); }
  void shutdown() override { inner_->shutdown(); }

 private:
  comm::WorldPtr inner_;
  Wrap wrap_;
  std::map<std::pair<std::vector<int>, std::string>, comm::CommunicatorPtr> groups_;
};

}  // namespace tessera::testing
