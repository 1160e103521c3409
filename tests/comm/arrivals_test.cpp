// How ranks wait for one another at the rendezvous.
#include "rendezvous/arrivals.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <stdexcept>
#include <string>
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

TEST(Arrivals, BelongToNoRankWhenTheStoreIsLost) {
  const auto store = c10::make_intrusive<LostStore>();
  JobVariables job;
  job.rank = 1;
  job.size = 3;
  job.address = "host";
  job.port = 7;
  const RecordPtr own = make_record(WatchSettings{}, job.size, "");
  EXPECT_ERROR(await_all_ranks(*store, job, {}, own),
               "rank 1 of 3 lost the store at host:7 at the rendezvous, where rank(s) 0, 2 did not "
               "come: the connection is closed");
}

}  // namespace
}  // namespace tessera::comm
