// A rank that is busy with a slow disk is waited for; one whose disk hangs is not.

#include <barrier>
#include <chrono>
#include <thread>

#include "checkpoint/known_model.h"
#include "checkpoint/stored_step.h"
#include "faults/system_calls.h"
#include "saved_state.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/work_progress.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::ErrorsOfRanks;
using testing::RanksOptions;
using testing::SystemCallFault;
using testing::TemporaryFolder;

/// Each call of rank 1 on its file takes 0.2 s, and it makes four or more.
RanksOptions short_time_out() {
  return {.world = {.timeout = std::chrono::milliseconds(600),
                    .watchdog = std::chrono::milliseconds(0)}};
}

std::string file_of_rank_1(const TemporaryFolder& dir, const std::string& prefix) {
  return dir.path().string() + "/step-00000001/" + prefix + "shard-00001";
}

TEST(SlowDisk, IsWaitedForWhileItGetsOn) {
  const TemporaryFolder dir;
  {
    const SystemCallFault fault(file_of_rank_1(dir, "."), "pwrite:1:slow");
    RunRanks(
        2,
        [&](Rank& rank) {
          SavedState state(rank, {2, 1}, 1);
          save(*rank.world(), dir.path(), 1, state.dict());
        },
        short_time_out());
    EXPECT_GE(SystemCallFault::calls("pwrite"), 4);
  }
  const SystemCallFault fault(file_of_rank_1(dir, ""), "pread:1:slow");
  RunRanks(
      2,
      [&](Rank& rank) {
        SavedState state(rank, {2, 1}, 5);
        load(*rank.world(), dir.path(), state.dict());
      },
      short_time_out());
  EXPECT_GE(SystemCallFault::calls("pread"), 4);
}

/// A piece of 2 MiB for one read, 0.2 s for each quarter of one.
TEST(SlowDisk, ReportsProgressAtEachQuarterOfAMebibyte) {
  const TemporaryFolder dir;
  const auto shard = [](Rank& rank, nn::Linear& large) {
    large.slot("weight")->set(
        distribute_tensor(at::ones({1024, 1024}), rank.mesh({2}, {"dp"}), {Shard{0}}));
  };
  RunRanks(2, [&](Rank& rank) {
    nn::Linear large(1024, 1024, nn::LinearOptions{false});
    shard(rank, large);
    save(*rank.world(), dir.path(), 1, {large});
  });
  const SystemCallFault fault(file_of_rank_1(dir, ""), "pread:1:slow");
  RunRanks(
      2,
      [&](Rank& rank) {
        nn::Linear large(1024, 1024, nn::LinearOptions{false});
        shard(rank, large);
        load(*rank.world(), dir.path(), {large});
      },
      short_time_out());
  EXPECT_GT(SystemCallFault::calls("pread"), 8);
}

TEST(SlowDisk, ReportsProgressFromHelperThreads) {
  RunRanks(
      2,
      [](Rank& rank) {
        const comm::CommunicatorPtr all = rank.world()->group({0, 1}, "all");
        all->barrier();
        const std::thread::id caller = std::this_thread::get_id();
        std::barrier both(2);
        const auto work = [&] {
          both.arrive_and_wait();  // a task for each thread
          for (int i = 0; i < 12 && std::this_thread::get_id() != caller; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            comm::note_progress(flight::Work::kReading);
          }
        };
        if (rank.rank() == 1) {
          run_on_threads(2, {work, work});
        }
        all->barrier();
      },
      short_time_out());
}

/// What is not on the disk yet is awaited without a word.
TEST(SlowDisk, IsWrittenToInPieces) {
  const TemporaryFolder dir;
  const SystemCallFault count(dir.path(), "");
  WriteModel(dir / "file", {{"large", at::ones({9 << 10, 1 << 10})}});
  EXPECT_GE(SystemCallFault::calls("pwrite"), 3);
  EXPECT_GE(SystemCallFault::calls("fsync"), 3);
}

TEST(SlowDisk, EndsTheSaveAtTheTimeOutIfItHangs) {
  const TemporaryFolder dir;
  const SystemCallFault fault(file_of_rank_1(dir, "."), "pwrite:3:stall");
  const auto errors = ErrorsOfRanks(
      2,
      [&](Rank& rank) {
        SavedState state(rank, {2, 1}, 1);
        save(*rank.world(), dir.path(), 1, state.dict());
      },
      short_time_out());
  EXPECT_CONTAINS(errors[0], "rank(s) 1 did not arrive within 600 ms",
                  "since then it has written files");
}

/// During a save in the background, and once it has ended.
TEST(SlowDisk, DoesNotHideRanksThatWaitForEachOther) {
  for (const bool ended : {false, true}) {
    const TemporaryFolder dir;
    const SystemCallFault fault(file_of_rank_1(dir, "."), ended ? "" : "pwrite:1:slow");
    const auto errors = ErrorsOfRanks(
        2,
        [&](Rank& rank) {
          SavedState state(rank, {2, 1}, 1);
          const comm::CommunicatorPtr group = rank.world()->group({0, 1}, "some");
          const comm::CommunicatorPtr other = rank.world()->group({0, 1}, "others");
          SaveFuture pending = async_save(*rank.world(), dir.path(), 1, state.dict());
          if (ended) {
            pending.wait();
          }
          (rank.rank() == 0 ? group : other)->all_reduce(at::zeros({4}), ReduceOp::kSum)->wait();
        },
        {.world = {.timeout = std::chrono::seconds(20),
                   .watchdog = std::chrono::milliseconds(200)}});
    EXPECT_CONTAINS(errors[0] + errors[1],
                    "each waits for another: make the ranks issue the same collectives");
  }
}

}  // namespace
}  // namespace tessera::checkpoint
