// Makes Worlds without a launcher: Worlds whose ranks are threads of this process, for tests and
// small jobs, and fake Worlds of which only one rank exists, for planning.

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "backends.h"
#include "checked/checked_communicator.h"
#include "rendezvous/store_world.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/c10d.h"

namespace tessera::comm {
namespace {

/// Disables libtorch's flight recorder, which has data races if ranks are threads. `done` is
/// static, so that setenv() runs only once: other threads may read the environment.
void disable_flight_recorder() {
  static const int done = setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  static_cast<void>(done);
}

/// A World in which only this rank exists. Calls are counted as in a real World.
class FakeWorld final : public World {
 public:
  FakeWorld(int rank, int size, const char* device, FakeStart start)
      : rank_(rank), size_(size), start_(std::move(start)), options_{.device = device} {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return rank_; }
  const WorldOptions& options() const override { return options_; }
  TrafficCounter& traffic() override { return *traffic_; }

  CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) override {
    const std::lock_guard lock(mutex_);
    // `groups_` caches process groups by ranks and name, because traffic is counted for each name.
    CommunicatorPtr& known = groups_[{ranks, name}];
    if (known == nullptr) {
      const GroupInfo info = info_of_group(*this, ranks, name);
      known = make_checked_communicator(make_loopback_communicator(info, start_), info, traffic_);
    }
    return known;
  }

 private:
  int rank_;
  int size_;
  FakeStart start_;
  WorldOptions options_;
  TrafficCounterPtr traffic_ = std::make_shared<TrafficCounter>();
  std::mutex mutex_;
  std::map<std::pair<std::vector<int>, std::string>, CommunicatorPtr> groups_;
};

}  // namespace

std::vector<WorldPtr> thread_worlds_on(const std::vector<std::string>& hosts,
                                       const WorldOptions& options) {
  const auto size = static_cast<int>(hosts.size());
  check_options(options);
  TESSERA_CHECK(options.backend != "nccl",
                "thread_worlds: NCCL needs a process per rank; use gloo");
  disable_flight_recorder();
  const auto store = detail::memory_store();
  store->setTimeout(options.timeout);
  const int number = next_world_number();
  std::vector<RecordPtr> records;
  for (int rank = 0; rank < size; ++rank) {
    // Without a path, the flight record is in memory. Files of several processes would have equal
    // names, because each process of a job can call thread_worlds().
    records.push_back(make_record(watch_settings(rank, number, options), size, ""));
  }
  std::vector<WorldPtr> worlds;
  for (int rank = 0; rank < size; ++rank) {
    const auto watch =
        std::make_shared<WorldWatch>(watch_settings(rank, number, options), records, nullptr);
    worlds.push_back(
        make_store_world({store, rank, size, rank, hosts, "127.0.0.1", watch}, options));
  }
  return worlds;
}

/// All ranks report the same machine, so that their process groups use shared memory, as process
/// groups of processes on one machine do.
std::vector<WorldPtr> thread_worlds(int size, const WorldOptions& options) {
  TESSERA_CHECK(size >= 1, "thread_worlds: ", size, " ranks were passed; pass at least one rank");
  return thread_worlds_on(std::vector<std::string>(static_cast<std::size_t>(size), "this process"),
                          options);
}

namespace {

WorldPtr make_fake_world(const char* asked, int rank, int size, const char* device,
                         FakeStart start = {}) {
  TESSERA_CHECK(size >= 1 && rank >= 0 && rank < size, asked, ": rank ", rank, " of ", size,
                " ranks was passed; pass 0 <= rank < size");
  return std::make_shared<FakeWorld>(rank, size, device, std::move(start));
}

}  // namespace

WorldPtr fake_world(int rank, int size) {
  return make_fake_world("fake_world", rank, size, "cpu");
}

WorldPtr fake_world(int rank, int size, FakeStart start) {
  return make_fake_world("fake_world", rank, size, "cpu", std::move(start));
}

WorldPtr meta_world(int rank, int size) {
  return make_fake_world("meta_world", rank, size, "meta");
}

}  // namespace tessera::comm
