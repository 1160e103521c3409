// How ranks wait for one another at the rendezvous.
#include "rendezvous/rendezvous_wait.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "testing/errors.h"
#include "watch/world_watch.h"

namespace tessera::comm {
namespace {

/// A store that is lost before its first answer.
class LostStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& /*keys*/) override {
    throw std::runtime_error("the connection is closed");
  }
};

JobVariables rank_of_job(int rank, int size) {
  JobVariables job;
  job.rank = rank;
  job.size = size;
  job.address = "host";
  job.port = 7;
  return job;
}

TEST(Arrivals, BelongToNoRankWhenTheStoreIsLost) {
  const auto store = c10::make_intrusive<LostStore>();
  const JobVariables job = rank_of_job(1, 3);
  const RecordPtr own = make_record(WatchSettings{}, job.size, "");
  EXPECT_ERROR(await_all_ranks(*store, job, {}, own),
               "rank 1 of 3 lost the store at host:7 at the rendezvous, where rank(s) 0, 2 did not "
               "come: the connection is closed");
}

TEST(Arrivals, AreAwaitedByAnotherThanRankZeroItself) {
  EXPECT_EQ(
      waiting_text(rank_of_job(0, 2), {}).find("tessera: rank 0 waits for the store at host:7"),
      0U);
}

// A node that was started with another number of ranks has numbers that others have, too.
TEST(Arrivals, OfJobsOfTwoSizesEndAllThatCame) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto arrive = [&](int rank, int size) {
    const JobVariables job = rank_of_job(rank, size);
    WatchSettings settings;
    settings.rank = rank;
    const RecordPtr own = make_record(settings, size, "");
    // Either of them may be the first to see the other.
    EXPECT_ERROR(await_all_ranks(*store, job, {.timeout = std::chrono::seconds(20)}, own),
                 " at host:7; start all nodes with the same number of nodes and of ranks on each");
  };
  std::thread waits(arrive, 0, 4);
  while (!store->check({"host/0"})) {
    std::this_thread::yield();
  }
  arrive(1, 2);
  waits.join();
}

}  // namespace
}  // namespace tessera::comm
