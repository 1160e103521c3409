// Tests async_save(), and checkpoints of buffers of libtorch modules (nn::adopt).

#include <csignal>
#include <cstdlib>
#include <thread>

#include "checkpoint/known_model.h"
#include "faults/system_calls.h"
#include "tessera/comm/communicator.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/hooked.h"
#include "testing/models.h"
#include "testing/module_values.h"
#include "testing/processes.h"

namespace tessera::checkpoint {
namespace {

using testing::SystemCallFault;

/// Overwrites all parameters and all optimizer state, as a training step does.
void change(const SavedState& state) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, slot] : state.net.named_slots()) {
    local_tensor(slot->persistent()).fill_(-1);
  }
  for (const auto& [name, tensor] : state.optimizer) {
    local_tensor(tensor).fill_(-1);
  }
}

TEST(AsyncSave, SavesTheStateAtTheTimeOfTheCall) {
  const TemporaryFolder dir;
  RunRanks(4, [&](Rank& rank) {
    SavedState state(rank, {2, 2}, 3);
    SaveFuture pending = async_save(*rank.world(), dir.path(), 1, state.dict());
    change(state);
    const at::Tensor& weight = state.net.middle->slot("weight")->persistent();
    for (int step = 0; step < 20; ++step) {  // full_tensor() communicates while the save still runs
      EXPECT_EQ(full_tensor(weight).sum().item<float>(), -35.0F);
    }
    pending.wait();
    EXPECT_TRUE(pending.done());
  });
  EXPECT_EQ(ExpectLoads(dir.path(), 3), 1);
}

TEST(AsyncSave, ResolvesRelativePathsAtTheTimeOfTheCall) {
  const TemporaryFolder dir, other;
  const auto before = std::filesystem::current_path();
  RunRanks(1, [&](Rank& rank) {
    SavedState state(rank, {1, 1}, 3);
    std::filesystem::current_path(dir.path());
    SaveFuture pending = async_save(*rank.world(), "run", 1, state.dict());
    std::filesystem::current_path(other.path());
    pending.wait();
  });
  std::filesystem::current_path(before);
  EXPECT_EQ(ExpectLoads(dir.path() / "run", 3), 1);
  EXPECT_TRUE(other.files().empty());
}

TEST(AsyncSave, WaitsForThePreviousSave) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    SaveFuture pending;
    EXPECT_TRUE(pending.done());
    pending.wait();
    for (const int step : {1, 2, 3}) {
      SavedState state(rank, {2, 1}, step);
      pending = async_save(*rank.world(), dir.path(), step, state.dict(), {.keep = 2});
    }
    SavedState state(rank, {2, 1}, 4);
    save(*rank.world(), dir.path(), 4, state.dict());
    EXPECT_TRUE(pending.done());
  });
  EXPECT_EQ(ExpectLoads(dir.path(), 4), 4);
  ExpectLoads(dir / "step-00000002", 2);
  EXPECT_FALSE(std::filesystem::exists(dir / "step-00000001"));
}

TEST(AsyncSave, ErrorReachesTheNextSaveOnAllRanks) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  const SystemCallFault fault(dir.path().string() + "/step-00000002/.shard-00003", "pwrite:1:EIO");
  const auto errors = ErrorsOfRanks(4, [&](Rank& rank) {
    SavedState state(rank, {2, 2}, 2);
    SaveFuture pending = async_save(*rank.world(), dir.path(), 2, state.dict());
    if (rank.rank() > 0) {
      EXPECT_ERROR(pending.wait(), "step-00000002/shard-00003");
    }
    save(*rank.world(), dir.path(), 3, state.dict());
  });
  EXPECT_CONTAINS(errors, "step-00000002/shard-00003");
  EXPECT_EQ(errors, std::vector<std::string>(4, errors[0]));
  EXPECT_EQ(ExpectLoads(dir.path(), 1), 1);
}

TEST(AsyncSave, WorksAgainAfterEveryRankHasReadTheError) {
  const TemporaryFolder dir;
  WriteFile(dir / "file", "");
  RunRanks(2, [&](Rank& rank) {
    SavedState state(rank, {2, 1}, 2);
    SaveFuture pending = async_save(*rank.world(), dir / "file", 1, state.dict());
    EXPECT_ERROR(pending.wait(), "/file/step-00000001'");
    EXPECT_ERROR(pending.wait(), "/file/step-00000001'");
    pending = async_save(*rank.world(), dir / "run", 1, state.dict());
  });
  EXPECT_EQ(ExpectLoads(dir / "run", 2), 1);
}

TEST(AsyncSave, CompletesOrFailsOnEachRankWhenTheWorldEnds) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  for (const int begun : {0, 3}) {  // `begun`: number of pwrite() calls after which the world ends
    std::vector<std::string> at_wait(2);
    const SystemCallFault fault(dir.path().string() + "/step-00000002/.shard", "pwrite:3:stall");
    RunRanks(2, [&](Rank& rank) {
      SavedState state(rank, {2, 1}, 2);
      SaveFuture pending = async_save(*rank.world(), dir.path(), 2, state.dict());
      while (SystemCallFault::calls("pwrite") < begun) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      rank.world()->shutdown();
      at_wait[static_cast<std::size_t>(rank.rank())] = testing::message_of([&] { pending.wait(); });
      EXPECT_TRUE(pending.done());
    });
    const bool there = std::filesystem::exists(dir / "step-00000002/manifest.json");
    for (const std::string& error : at_wait) {
      EXPECT_TRUE(there || error.find("before World::shutdown()") != std::string::npos) << error;
    }
    EXPECT_EQ(ExpectLoads(dir.path(), there ? 2 : 1), there ? 2 : 1);
    std::filesystem::remove_all(dir / "step-00000002");
  }
}

TEST(AsyncSave, WarnsOfAnErrorThatIsNeverRead) {
  const TemporaryFolder dir;
  WriteFile(dir / "file", "");
  HeardWarnings warnings;
  RunRanks(1, [&](Rank& rank) {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    SavedState state(rank, {1, 1});
    static_cast<void>(async_save(*rank.world(), dir / "file", 1, state.dict()));
  });
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_CONTAINS(warnings.texts[0], "a checkpoint was not saved: ", "/file/step-00000001'");
}

/// Uses a world of one rank, because a process made by fork() has only one thread.
void save_in_background(const std::filesystem::path& dir, std::int64_t step, int add) {
  Rank rank(comm::thread_worlds(1)[0]);
  SavedState state(rank, {1, 1}, add);
  async_save(*rank.world(), dir, step, state.dict(), {.keep = 2}).wait();
}

TEST(AsyncSave, KeepsTheLastCommittedStepIfKilled) {
  int calls = 0;
  for (bool ended = false; !ended; calls += 5) {
    const TemporaryFolder dir;
    save_in_background(dir.path(), 1, 1);
    ended = testing::survives([&] {
      const SystemCallFault fault(dir.path(), "any:" + std::to_string(calls + 1) + ":kill");
      save_in_background(dir.path(), 2, 2);
    });
    const bool second = std::filesystem::exists(dir / "step-00000002/manifest.json");
    EXPECT_EQ(ExpectLoads(dir.path(), second ? 2 : 1), second ? 2 : 1) << calls + 1;
  }
  EXPECT_GT(calls, 15);
}

TEST(DISABLED_AsyncSave, SaveWhereARankIsKilled) {
  Rank rank(comm::world_from_environment());
  const std::filesystem::path dir = std::getenv("TEST_DIR");
  SavedState state(rank, {2, 1}, 1);
  async_save(*rank.world(), dir, 1, state.dict()).wait();
  SaveFuture pending = async_save(*rank.world(), dir, 2, state.dict());
  EXPECT_THROWN(comm::PeerError, pending.wait(), "checkpoint::async_save", "rank 1 ");
  EXPECT_THROWN(comm::PeerError, save(*rank.world(), dir, 3, state.dict()),
                "the group failed earlier");
}

TEST(AsyncSave, FailsOnOtherRanksIfOneRankIsKilled) {
  const TemporaryFolder dir;
  const auto ended =
      testing::RunProcesses(2, "DISABLED_AsyncSave.SaveWhereARankIsKilled",
                            {.environment = {{"TEST_DIR", dir.path()},
                                             {"TESSERA_FAULT", "pwrite:1:kill"},
                                             {"TESSERA_FAULT_UNDER", dir / "step-00000002"},
                                             {"TESSERA_FAULT_RANK", "1"}}});
  EXPECT_EQ(ended[0].exit_code, 0) << ended[0].output;
  EXPECT_EQ(ended[1].signal, SIGKILL) << ended[1].output;
  EXPECT_EQ(ExpectLoads(dir.path(), 1), 1);
}

TEST(LargeFile, IsWrittenAndSyncedInPieces) {
  const TemporaryFolder dir;
  const SystemCallFault count(dir.path(), "");
  WriteModel(dir / "file", {{"large", at::ones({9 << 10, 1 << 10})}});
  EXPECT_GE(SystemCallFault::calls("pwrite"), 3);
  EXPECT_GE(SystemCallFault::calls("fsync"), 3);
}

/// Tests checkpoints of the buffers of libtorch modules, such as BatchNorm1d's running statistics.
TEST(AdoptedModel, SavesBuffersUnderTheirLibtorchNames) {
  const auto make = [](Rank& rank) {
    auto model = nn::adopt(std::make_shared<testing::TorchWithBuffers>());
    testing::fill(*model);
    fsdp::fully_shard(*model, rank.mesh({rank.size()}, {"dp"}));
    return model;
  };
  const at::Tensor x = testing::uniform_values({4, 5}, 0.7);
  const TemporaryFolder dir;
  at::Tensor expected;
  RunRanks(2, [&](Rank& rank) {
    const auto model = make(rank);
    (*model)(x);
    model->held().shift.fill_(3);
    save(*rank.world(), dir.path(), 1, {*model});
    model->eval();
    const at::Tensor y = (*model)(x).detach();
    if (rank.rank() == 0) {
      expected = y;
    }
  });
  RunRanks(3, [&](Rank& rank) {
    const auto model = make(rank);
    const LoadReport report = load(*rank.world(), dir.path(), {*model});
    EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
    EXPECT_EQ(model->held().named_buffers()["norm.num_batches_tracked"].item<int>(), 1);
    model->eval();
    EXPECT_TRUE((*model)(x).allclose(expected));
  });
}

}  // namespace
}  // namespace tessera::checkpoint
