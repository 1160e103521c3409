#include <algorithm>
#include <mutex>

#include "checked_communicator.h"
#include "loopback_communicator.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

class FakeWorld final : public World {
 public:
  FakeWorld(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return rank_; }
  const WorldOptions& options() const override { return options_; }
  TrafficCounter& traffic() override { return *traffic_; }

  CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) override {
    const std::lock_guard lock(mutex_);
    CommunicatorPtr& known = groups_[{ranks, name}];
    if (known == nullptr) {
      const auto self = std::ranges::find(ranks, rank_);
      TESSERA_CHECK(self != ranks.end(), "group '", name, "' of ranks ", join(ranks), ": rank ",
                    rank_, " is not a member; only members may ask for it");
      const GroupInfo info{name, ranks, static_cast<int>(self - ranks.begin()), options_.timeout};
      known = make_checked_communicator(make_loopback_communicator(info.rank, info.size()), info,
                                        traffic_);
    }
    return known;
  }

 private:
  int rank_;
  int size_;
  WorldOptions options_;
  TrafficCounterPtr traffic_ = std::make_shared<TrafficCounter>();
  std::mutex mutex_;
  std::map<std::pair<std::vector<int>, std::string>, CommunicatorPtr> groups_;
};

}  // namespace

WorldPtr fake_world(int rank, int size) {
  TESSERA_CHECK(size >= 1 && rank >= 0 && rank < size, "fake_world: rank ", rank, " of ", size,
                " ranks; give 0 <= rank < size");
  return std::make_shared<FakeWorld>(rank, size);
}

}  // namespace tessera::comm
