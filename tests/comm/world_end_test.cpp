// Tests the end of a world and of a program, and the errors of objects that outlive their world.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <stdexcept>

#include "group_of_all.h"
#include "testing/processes.h"

namespace tessera::comm {
namespace {

using testing::ErrorsOfRanks;

TEST_ON_RANKS(World, ShutdownEndsItsGroups, 2) {
  const CommunicatorPtr group = group_of_all(*rank.world());
  const at::Tensor value = at::zeros({4});
  group->all_reduce(value, ReduceOp::kSum)->wait();
  group->barrier();
  rank.world()->shutdown();
  const char* const said = "the group's world has ended; make this call before World::shutdown()";
  EXPECT_ERROR(group->all_reduce(value, ReduceOp::kSum), "all_reduce in group 'all'", said);
  EXPECT_ERROR(group->barrier(), "barrier in group 'all'", said);
  EXPECT_ERROR(group->allocate(4, value.options()), "allocate in group 'all'", said);
  EXPECT_ERROR(rank.world()->group({rank.rank()}, "late"),
               "group 'late': this rank's world has ended");
  rank.world()->shutdown();
}

TEST(DeviceMesh, OutlivesItsWorld) {
  DeviceMesh mesh;
  {
    const WorldScope scope(thread_worlds(1).front());
    mesh = init_device_mesh(scope.world(), {1}, {"dp"});
    mesh.group().barrier();
  }
  EXPECT_EQ(mesh.size(), 1);
  EXPECT_ERROR(mesh.group().barrier(), "barrier in group 'dp'", "the group's world has ended");
}

TEST(Communicator, WorksAfterItsWorldIsDestroyed) {
  const CommunicatorPtr group = group_of_all(*thread_worlds(1).front());
  at::Tensor value = at::ones({4});
  group->all_reduce(value, ReduceOp::kSum)->wait();
  EXPECT_TRUE(value.equal(at::ones({4})));
}

TEST(WorldScope, AbortsTheWorldOnAnException) {
  const auto errors = ErrorsOfRanks(2, [](Rank& rank) {
    const CommunicatorPtr group = group_of_all(*rank.world());
    if (rank.rank() == 1) {
      const WorldScope scope(rank.world());
      throw std::runtime_error("the data are damaged");
    }
    group->all_reduce(at::zeros({4}), ReduceOp::kSum)->wait();
  });
  EXPECT_CONTAINS(errors[0], "all_reduce in group 'all'", "rank 1 gave up");
}

class Stubborn final : public World {
 public:
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int local_rank() const override { return inner_->local_rank(); }
  const WorldOptions& options() const override { return inner_->options(); }
  TrafficCounter& traffic() override { return inner_->traffic(); }
  CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) override {
    return inner_->group(ranks, name);
  }
  void abort() override { throw std::runtime_error("the device does not answer"); }

 private:
  WorldPtr inner_ = thread_worlds(1).front();
};

TEST(WorldScope, KeepsTheExceptionIfAbortThrows) {
  const auto leave = [] {
    const WorldScope scope(std::make_shared<Stubborn>());
    throw std::runtime_error("the data are damaged");
  };
  EXPECT_THROWN(std::runtime_error, leave(), "the data are damaged");
}

TEST(WorldScope, EndsNormallyInsideADestructorDuringUnwinding) {
  const WorldPtr world = thread_worlds(1).front();
  struct CleanUp {
    WorldPtr world;
    ~CleanUp() { const WorldScope scope(world); }
  };
  try {
    const CleanUp clean_up{world};
    throw std::runtime_error("an error that was dealt with");
  } catch (const std::runtime_error&) {
  }
  EXPECT_ERROR(world->group({0}, "late"), "has ended");
}

// thread_worlds() sets TORCH_FR_BUFFER_SIZE to 0, which turns libtorch's flight recorder off.
TEST(DISABLED_WorldEnd, RunsAProcessToItsEnd) {
  const WorldPtr world = world_from_environment();
  group_of_all(*world)->barrier();
  EXPECT_STREQ(std::getenv("TORCH_FR_BUFFER_SIZE"), "100");
  thread_worlds(1);
  EXPECT_STREQ(std::getenv("TORCH_FR_BUFFER_SIZE"), "0");
}

TEST(LibtorchFlightRecorder, IsOffOnlyForThreadWorlds) {
  for (const testing::Ended& ended :
       testing::RunProcesses(2, "DISABLED_WorldEnd.RunsAProcessToItsEnd",
                             {.environment = {{"TORCH_FR_BUFFER_SIZE", "100"}}})) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  }
}

TEST(RunMainDeathTest, ReturnsZeroOrPrintsAOneLineError) {
  bool ran = false;
  EXPECT_EQ(run_main([&] { ran = true; }), 0);
  EXPECT_TRUE(ran);
  const auto error_of_rank_2 = [] {
    unsetenv("TESSERA_JOB_TOKEN");
    setenv("RANK", "2", 1);
    setenv("WORLD_SIZE", "4", 1);
    setenv("MASTER_ADDR", "localhost", 1);
    setenv("MASTER_PORT", "1", 1);
    fail("rows are missing");
  };
  for (const auto& [body, line] : std::vector<std::pair<std::function<void()>, std::string>>{
           {[] { fail("rows are missing"); }, "^error: rows are missing\n$"},
           {[] { at::mm(at::ones({2, 3}), at::ones({2, 3})); },
            "^error: [^\n]*mat1 and mat2 shapes[^\n]*\n$"},
           {[] { at::ones({std::int64_t{1} << 46}); },
            "(^|\n)error: [^\n]*can't allocate memory[^\n]*Cannot allocate memory[^\n]{0,2}\n$"},
           {error_of_rank_2, "rank 2 of 4: error: rows are missing"}}) {
    EXPECT_EXIT(run_main(body), ::testing::ExitedWithCode(1), line);
  }
}

}  // namespace
}  // namespace tessera::comm
