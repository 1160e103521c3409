// Saves in the background, slow disks, and several blocks of one tensor on a rank.

#include <pthread.h>

#include <csignal>
#include <cstdlib>
#include <thread>

#include "checkpoint/known_model.h"
#include "faults/system_calls.h"
#include "tessera/comm/communicator.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/hooked.h"
#include "tessera/optim/adamw.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/files.h"
#include "testing/models.h"
#include "testing/module_values.h"
#include "testing/processes.h"

namespace tessera::checkpoint {
namespace {

using testing::ErrorsOfRanks;
using testing::SystemCallFault;
using testing::TemporaryFolder;
using testing::WriteFile;

/// Writes other values everywhere, as a training step does.
void change(const SavedState& state) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, slot] : state.net.named_slots()) {
    local_tensor(slot->persistent()).fill_(-1);
  }
  for (const auto& [name, tensor] : state.optimizer) {
    local_tensor(tensor).fill_(-1);
  }
}

TEST(AsyncSave, HoldsTheStateOfTheCallWhileTrainingContinues) {
  const TemporaryFolder dir;
  RunRanks(4, [&](Rank& rank) {
    SavedState state(rank, {2, 2}, 3);
    SaveFuture pending = async_save(*rank.world(), dir.path(), 1, state.dict());
    change(state);
    const at::Tensor& weight = state.net.middle->slot("weight")->persistent();
    for (int step = 0; step < 20; ++step) {  // collectives of the program between those of the save
      EXPECT_EQ(testing::full_tensor(weight).sum().item<float>(), -35.0F);
    }
    pending.wait();
    EXPECT_TRUE(pending.done());
    EXPECT_GT(pending.stall_seconds(), 0.0);
  });
  EXPECT_EQ(ExpectLoads(dir.path(), 3), 1);
}

TEST(AsyncSave, GoesBelowTheWorkingDirectoryOfTheCall) {
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

TEST(AsyncSave, EachWaitsForTheOneBefore) {
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

TEST(AsyncSave, RefusesAFaultyStateAtTheCall) {
  const TemporaryFolder dir;
  const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
    SavedState state(rank, {2, 1});
    if (rank.rank() == 1) {
      state.net.head->slot("weight")->set_initialized(false);
    }
    static_cast<void>(async_save(*rank.world(), dir.path(), 1, state.dict()));
  });
  EXPECT_CONTAINS(errors, "parameter 'head.weight' was never filled");
  EXPECT_TRUE(dir.files().empty());
}

TEST(AsyncSave, ThrowsItsErrorFromTheNextSaveOnAllRanks) {
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

TEST(AsyncSave, ContinuesOnceEveryRankHasSeenTheError) {
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
  for (const int begun : {0, 3}) {  // before the files are made, and while they are written
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

/// Runs a disabled test on ranks that are processes, with `dir` and this fault of rank 1.
std::vector<testing::Ended> run_with(const TemporaryFolder& dir, int ranks, const std::string& test,
                                     const std::string& fault = "", const std::string& under = "") {
  std::map<std::string, std::string> environment = {{"TEST_DIR", dir.path()}};
  if (!fault.empty()) {
    environment["TESSERA_FAULT"] = fault;
    environment["TESSERA_FAULT_UNDER"] = dir / under;
    environment["TESSERA_FAULT_RANK"] = "1";
  }
  return testing::RunProcesses(ranks, "DISABLED_AsyncSave." + test, {.environment = environment});
}

TEST(AsyncSave, AnErrorThatIsNeverReadIsAWarning) {
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

/// Saves with one rank and no other thread, so that a process made by fork() can do it.
void save_in_background(const std::filesystem::path& dir, std::int64_t step, int add) {
  Rank rank(comm::thread_worlds(1)[0]);
  SavedState state(rank, {1, 1}, add);
  async_save(*rank.world(), dir, step, state.dict(), {.keep = 2}).wait();
}

TEST(AsyncSave, KilledAtAnyCallLeavesTheNewestCommittedStep) {
  int calls = 0;
  for (bool ended = false; !ended; calls += 5) {
    const TemporaryFolder dir;
    save_in_background(dir.path(), 1, 1);
    const pid_t child = fork();
    if (child == 0) {
      const SystemCallFault fault(dir.path(), "any:" + std::to_string(calls + 1) + ":kill");
      save_in_background(dir.path(), 2, 2);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ended = WIFEXITED(status);
    const bool second = std::filesystem::exists(dir / "step-00000002/manifest.json");
    EXPECT_EQ(ExpectLoads(dir.path(), second ? 2 : 1), second ? 2 : 1) << calls + 1;
  }
  EXPECT_GT(calls, 15);
}

/// A rank of a world of processes, and the folder of the test.
struct Process {
  comm::WorldPtr world = comm::world_from_environment();
  Rank rank{world};
  std::filesystem::path dir = std::getenv("TEST_DIR");
};

TEST(DISABLED_AsyncSave, SaveToAFolderWithADamagedStep) {
  Process self;
  SavedState state(self.rank, {1, 1}, 1);
  save(*self.world, self.dir, 1, state.dict());
  WriteFile(self.dir / "step-00000001/manifest.json", "{}");
  async_save(*self.world, self.dir, 2, state.dict(), {.keep = 2}).wait();
}

// libtorch's own form of a warning is "[W1123 10:15:09.123456789 step_folder.cpp:120] ...".
TEST(AsyncSave, WarnsAsTheRestOfTheJobDoes) {
  const TemporaryFolder dir;
  const auto ended = run_with(dir, 1, "SaveToAFolderWithADamagedStep");
  EXPECT_EQ(ended[0].exit_code, 0) << ended[0].output;
  EXPECT_CONTAINS(ended[0].output, "tessera: warning: ", "the manifest ");
  EXPECT_EQ(ended[0].output.find("[W"), std::string::npos) << ended[0].output;
}

/// Sets a default stack size that is larger than the address space.
void allow_no_more_threads() {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, std::size_t{1} << 47), 0);
  ASSERT_EQ(pthread_setattr_default_np(&attributes), 0);
}

TEST(DISABLED_AsyncSave, SaveWhereARankHasNoThread) {
  Process self;
  SavedState state(self.rank, {2, 1}, 1);
  save(*self.world, self.dir, 1, state.dict());
  if (self.world->rank() == 1) {
    allow_no_more_threads();
  }
  EXPECT_ERROR(static_cast<void>(async_save(*self.world, self.dir, 2, state.dict())), "thread",
               "save at once");
  save(*self.world, self.dir, 3, state.dict());
}

TEST(AsyncSave, ARankWithoutAThreadIsAnErrorOnAll) {
  const TemporaryFolder dir;
  for (const auto& ended : run_with(dir, 2, "SaveWhereARankHasNoThread")) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  }
  EXPECT_FALSE(std::filesystem::exists(dir / "step-00000002"));
  EXPECT_EQ(ExpectLoads(dir.path(), 1), 3);
}

TEST(DISABLED_AsyncSave, SaveWhereARankIsKilled) {
  Process self;
  SavedState state(self.rank, {2, 1}, 1);
  async_save(*self.world, self.dir, 1, state.dict()).wait();
  SaveFuture pending = async_save(*self.world, self.dir, 2, state.dict());
  EXPECT_THROWN(comm::PeerError, pending.wait(), "checkpoint::async_save", "rank 1 ");
  EXPECT_THROWN(comm::PeerError, save(*self.world, self.dir, 3, state.dict()),
                "the group failed earlier");
}

TEST(AsyncSave, ARankThatDiesEndsItOnTheOthersAndCostsNoOlderStep) {
  const TemporaryFolder dir;
  const auto ended = run_with(dir, 2, "SaveWhereARankIsKilled", "pwrite:1:kill", "step-00000002");
  EXPECT_EQ(ended[0].exit_code, 0) << ended[0].output;
  EXPECT_EQ(ended[1].signal, SIGKILL) << ended[1].output;
  EXPECT_EQ(ExpectLoads(dir.path(), 1), 1);
}

using testing::RanksOptions;

/// A time-out of 600 ms.
RanksOptions short_time_out() {
  return {.world = {.timeout = std::chrono::milliseconds(600),
                    .watchdog = std::chrono::milliseconds(0)}};
}

std::string file_of_rank_1(const TemporaryFolder& dir, const std::string& prefix) {
  return dir.path().string() + "/step-00000001/" + prefix + "shard-00001";
}

TEST(SlowDisk, IsWrittenToInPieces) {
  const TemporaryFolder dir;
  const SystemCallFault count(dir.path(), "");
  WriteModel(dir / "file", {{"large", at::ones({9 << 10, 1 << 10})}});
  EXPECT_GE(SystemCallFault::calls("pwrite"), 3);
  EXPECT_GE(SystemCallFault::calls("fsync"), 3);
}

void save_known_model(Rank& rank, const std::filesystem::path& dir) {
  SavedState state(rank, {2, 1}, 1);
  save(*rank.world(), dir, 1, state.dict());
}

TEST(SlowDisk, EndsTheSaveAtTheTimeOutIfItHangs) {
  const TemporaryFolder dir;
  const SystemCallFault fault(file_of_rank_1(dir, "."), "pwrite:3:stall");
  const auto errors =
      ErrorsOfRanks(2, [&](Rank& rank) { save_known_model(rank, dir.path()); }, short_time_out());
  EXPECT_CONTAINS(errors[0], "rank(s) 1 did not arrive within 600 ms");
}

namespace held_parts {

constexpr std::int64_t kRows = 6, kTokens = 3, kDim = 8;

using Layer = nn::Hooked<torch::nn::TransformerEncoderLayer>;

torch::nn::TransformerEncoderLayerOptions options() {
  return torch::nn::TransformerEncoderLayerOptions(kDim, 2).dim_feedforward(10).dropout(0);
}

/// (tokens, rows, dim) -> a loss.
struct Encoder : nn::Module<Encoder> {
  at::Tensor forward(const at::Tensor& x) { return second(first(x)).sin().mean(); }
  nn::Child<Layer> first{*this, "first", options()};
  nn::Child<Layer> second{*this, "second", options()};
};

/// Splits the encoder by FSDP over the first mesh dimension and by a tensor-parallel plan over the
/// second.
void split(Encoder& model, const DeviceMesh& mesh) {
  using namespace tensor_parallel;
  testing::fill(model);
  parallelize_module(model, mesh["tp"],
                     {{"*.linear1", place_parameters({{"weight", Shard{0}}, {"bias", Shard{0}}})},
                      {"*.linear2", place_parameters({{"weight", Shard{1}}})}});
  fsdp::fully_shard(*model.first, mesh["dp"]);
  fsdp::fully_shard(model, mesh["dp"]);
}

void train(Encoder& model, optim::Sgd& optimizer, const DeviceMesh& mesh) {
  const std::int64_t rows = kRows / mesh.size("dp");
  const at::Tensor x = testing::uniform_values({kTokens, kRows, kDim}, 0.4);
  model(x.narrow(1, mesh.local_rank("dp") * rows, rows)).backward();
  optimizer.step();
  optimizer.zero_grad();
}

/// Runs `body` with an untrained model on a mesh of these sizes.
void on_mesh(const std::vector<std::int64_t>& sizes,
             const std::function<void(Rank&, Encoder&, optim::Sgd&, const DeviceMesh&)>& body) {
  RunOnMesh(sizes, {"dp", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Encoder model;
    split(model, mesh);
    optim::Sgd optimizer(model, {.lr = 0.1, .momentum = 0.9});
    body(rank, model, optimizer, mesh);
  });
}

TEST(HeldPartsCheckpoint, ContinuesOnAnyMesh) {
  const testing::TemporaryFolder dir;
  at::Tensor trained, further;
  on_mesh({3, 1}, [&](Rank& rank, Encoder& model, optim::Sgd& optimizer, const DeviceMesh& mesh) {
    train(model, optimizer, mesh);
    save(*rank.world(), dir.path(), 1, {model, optim::named_state(optimizer, model)});
    const at::Tensor saved = testing::parameter_values(model);
    train(model, optimizer, mesh);
    const at::Tensor next = testing::parameter_values(model);
    if (rank.rank() == 0) {
      trained = saved;
      further = next;
    }
  });
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{1, 1}, {2, 2}, {1, 3}, {6, 1}}) {
    on_mesh(sizes, [&](Rank& rank, Encoder& model, optim::Sgd& optimizer, const DeviceMesh& mesh) {
      const LoadReport report =
          load(*rank.world(), dir.path(), {model, optim::named_state(optimizer, model)});
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
      EXPECT_TRUE(testing::parameter_values(model).equal(trained));
      train(model, optimizer, mesh);
      EXPECT_TRUE(testing::parameter_values(model).allclose(further, 1e-4, 1e-5));
    });
  }
}

/// The statistics of a norm in an adopted model, and a buffer of the adopted class.
TEST(HeldPartsCheckpoint, HasBuffersUnderTheirNamesInLibtorch) {
  const auto make = [](Rank& rank) {
    auto model = nn::adopt(std::make_shared<testing::TorchWithBuffers>());
    testing::fill(*model);
    fsdp::fully_shard(*model, rank.mesh({rank.size()}, {"dp"}));
    return model;
  };
  const at::Tensor x = testing::uniform_values({4, 5}, 0.7);
  const testing::TemporaryFolder dir;
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

}  // namespace held_parts
}  // namespace
}  // namespace tessera::checkpoint
