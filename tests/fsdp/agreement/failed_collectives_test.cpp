// What is left behind by collectives that failed, that differ between ranks, or whose unit is gone.
#include <c10/util/Exception.h>

#include <cstdlib>
#include <stdexcept>

#include "fsdp/streams/recording_streams.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "testing/environment.h"

namespace tessera::fsdp {
namespace {

using testing::ErrorsOfRanks;

/// Two units of one size that all ranks run.
struct Twins : nn::Module<Twins> {
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {(*a)(x), (*b)(x)}; }

  nn::Child<nn::Linear> a{*this, "a", 3, 3}, b{*this, "b", 3, 3};
};

class DifferentReductions : public ::testing::TestWithParam<bool> {};

std::vector<std::string> errors_of_twins(const std::vector<std::int64_t>& sizes,
                                         const std::vector<std::string>& names) {
  return ErrorsOfRanks(4, [&](Rank& rank) {
    Filled<Twins> model;
    const DeviceMesh mesh = rank.mesh(sizes, names);
    const Options zero2{.reshard_after_forward = false};
    fully_shard(*model.a, mesh, zero2);
    fully_shard(*model.b, mesh, zero2);
    fully_shard(model, mesh, zero2);
    const auto [a, b] = model(testing::uniform_values({4, 3}, 9));
    (rank.rank() < 2 ? a : b).sum().backward();
  });
}

TEST_P(DifferentReductions, AreNamedByEveryRank) {
  const testing::SharedMemory shared_memory(GetParam());
  const std::vector<std::string> errors = errors_of_twins({4}, {"dp"});
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_CONTAINS(errors[rank], rank < 2 ? "unit 'a'" : "unit 'b'");
  }
}

// Without shared memory Gloo, which compares nothing itself.
INSTANTIATE_TEST_SUITE_P(SharedMemoryOrNot, DifferentReductions, ::testing::Bool());

TEST(DifferentReductions, AreNamedForReplicas) {
  const testing::SharedMemory without_shared_memory(false);
  const std::vector<std::string> errors = errors_of_twins({2, 2}, {"replicate", "shard"});
  EXPECT_CONTAINS(errors, "all_reduce for unit 'a'", "all_reduce for unit 'b'");
}

TEST(DifferentReductions, AreDetectedWithoutChangingValues) {
  const testing::SharedMemory without_shared_memory(false);
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(4, [&](Rank& rank) {
    for (const bool replicated : {false, true}) {
      ShardedModel model(replicated ? rank.mesh({2, 2}, {"replicate", "shard"})
                                    : rank.mesh({4}, {"dp"}));
      local_loss(model, rank).backward();
      expect_gradients(model, expected);
    }
  });
}

/// Runs one of two modules that are one unit.
struct Partial : nn::Module<Partial> {
  at::Tensor forward(const at::Tensor& x) { return (*a)(x); }
  nn::Child<nn::Linear> a{*this, "a", 3, 3}, b{*this, "b", 3, 3};
};

class CountingWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("did not run") != std::string::npos) {
      ++count;
    }
  }
  int count = 0;
};

TEST(ListUnit, WarnsOnceOfAModuleThatNeverRunsAndIsFreedAfterForward) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Filled<Partial> model;
    fully_shard({&*model.a, &*model.b}, mesh);
    fully_shard(model, mesh);
    CountingWarnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = model(testing::uniform_values({4, 3}, 9)).sum();
      EXPECT_FALSE(model.a->attached<Unit>()->unsharded());
      loss.backward();
      EXPECT_TRUE(model.a->slot("weight")->persistent().grad().defined());
    }
    EXPECT_EQ(warnings.count, 1);
  });
}

TEST(ListUnit, MayBeginWithAModuleOutsideOfTheRoot) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    Partial model;
    nn::Linear outside(3, 3);
    testing::fill(model);
    testing::fill(outside);
    fully_shard({&outside, &*model.a}, mesh);
    fully_shard(model, mesh);
    model(testing::uniform_values({4, 3}, 9)).sum().backward();
    EXPECT_EQ(model.a->attached<Unit>()->label(), "unit 'a'");
    EXPECT_TRUE(model.a->slot("weight")->persistent().grad().defined());
  });
}

}  // namespace
}  // namespace tessera::fsdp
