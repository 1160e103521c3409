// Whatever happens during a save, no older step is lost, and every step found is whole.
//
// TESSERA_EVERY_FAULT=1 runs every action at every call of a save, and every rank at every phase;
// without it a few of them, spread evenly. docs/checkpoints.md has their numbers.

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "faults/changes.h"
#include "faults/power_cut.h"
#include "faults/system_calls.h"
#include "saved_state.h"
#include "tessera/checkpoint/inspect.h"
#include "testing/files.h"
#include "testing/processes.h"
#include "testing/survives.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::Change;
using testing::Changes;
using testing::Disk;
using testing::ErrorsOfRanks;
using testing::Lost;
using testing::SystemCallFault;
using testing::TemporaryFolder;

constexpr const char* kManifestOf3 = "step-00000003/manifest.json";
const std::vector<std::string> kCalls = {"openat", "pwrite", "fsync", "fallocate", "rename",
                                         "unlink", "pread",  "close", "link"};

bool every_fault() {
  return std::getenv("TESSERA_EVERY_FAULT") != nullptr;
}

/// In this thread, so that a process made by fork() can do it.
void save_alone(const fs::path& dir, std::int64_t step, int add, int keep = 0) {
  Rank rank(comm::thread_worlds(1)[0]);
  SavedState state(rank, {1, 1}, add);
  save(*rank.world(), dir, step, state.dict(), {.keep = keep});
}

/// The save that is interrupted: it has all phases, removal of older steps among them.
void save_third(const fs::path& dir) {
  save_alone(dir, 3, 3, 2);
}

void save_two(const fs::path& dir) {
  save_alone(dir, 1, 1);
  save_alone(dir, 2, 2);
}

/// What must hold at any time during save_third(): the newest step is whole, and those before it.
void expect_whole_steps(const fs::path& dir, const std::string& when) {
  const bool third = fs::exists(dir / kManifestOf3);
  EXPECT_EQ(ExpectLoads(dir, third ? 3 : 2), third ? 3 : 2) << when;
  EXPECT_TRUE(verify_step(find_step(dir)).empty()) << when;
  ExpectLoads(dir / "step-00000002", 2);
  if (!third) {
    ExpectLoads(dir / "step-00000001", 1);
  }
}

/// How a process ended that saved.
enum class Ending { kDone, kError, kKilled, kModelChanged, kOther };

template <class Work>
Ending ending_of(const Work& work) {
  const int status = testing::status_of_process([&] { return static_cast<int>(work()); });
  if (WIFSIGNALED(status)) {
    return WTERMSIG(status) == SIGKILL ? Ending::kKilled : Ending::kOther;
  }
  return static_cast<Ending>(WEXITSTATUS(status));
}

Ending save_third_with(const fs::path& dir, const std::string& fault) {
  return ending_of([&] {
    Rank rank(comm::thread_worlds(1)[0]);
    SavedState state(rank, {1, 1}, 3);
    const Tensors before = state.local();
    const SystemCallFault planted(dir, fault);
    Ending ending = Ending::kDone;
    try {
      save(*rank.world(), dir, 3, state.dict(), {.keep = 2});
    } catch (const Error&) {
      ending = Ending::kError;
    } catch (...) {
      ending = Ending::kOther;
    }
    for (const auto& [name, tensor] : state.local()) {
      ending = at::equal(tensor, before.at(name)) ? ending : Ending::kModelChanged;
    }
    return ending;
  });
}

/// "pwrite:3:EIO", for each call that save_third() makes and each thing that can happen there.
std::vector<std::string> all_faults() {
  const TemporaryFolder dir;
  save_two(dir.path());
  std::vector<std::string> faults;
  const SystemCallFault counted(dir.path(), "");
  save_third(dir.path());
  for (const std::string& call : kCalls) {
    const bool moves_bytes = call == "pwrite" || call == "pread";
    for (int k = 1; k <= SystemCallFault::calls(call); ++k) {
      for (const char* action : {"kill", "ENOSPC", "EIO", "EINTR", "EDQUOT"}) {
        faults.push_back(call + ":" + std::to_string(k) + ":" + action);
      }
      for (const char* action : {"short", "zero"}) {
        if (moves_bytes) {
          faults.push_back(call + ":" + std::to_string(k) + ":" + action);
        }
      }
    }
  }
  return faults;
}

/// `count` of the indices below `size`, spread evenly.
std::vector<std::size_t> spread(std::size_t count, std::size_t size) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < count; ++i) {
    indices.push_back(i * size / count);
  }
  return indices;
}

TEST(InterruptedSave, LeavesWholeStepsWhateverASystemCallDoes) {
  const std::vector<std::string> faults = all_faults();
  const std::size_t count = every_fault() ? faults.size() : 20;
  for (const std::size_t i : spread(count, faults.size())) {
    const std::string& fault = faults[i];
    const TemporaryFolder dir;
    save_two(dir.path());
    const Ending ending = save_third_with(dir.path(), fault);
    EXPECT_EQ(ending == Ending::kKilled, fault.ends_with("kill")) << fault;
    EXPECT_LE(ending, Ending::kKilled) << fault;
    const bool third = fs::exists(dir / kManifestOf3);
    if (ending != Ending::kKilled) {
      EXPECT_EQ(third, ending == Ending::kDone) << fault;
    }
    expect_whole_steps(dir.path(), fault);
    save_alone(dir.path(), third ? 4 : 3, 5);  // the run, started again
    ExpectLoads(dir.path(), 5);
  }
  std::printf("%zu of %zu faults\n", count, faults.size());
}

TEST(InterruptedSave, ContinuesAfterASignalOrAShortWrite) {
  for (const char* fault : {"pwrite:2:EINTR", "fsync:2:EINTR", "fallocate:1:EINTR",
                            "pwrite:2:short", "pread:1:EINTR", "pread:1:short"}) {
    const TemporaryFolder dir;
    save_two(dir.path());
    EXPECT_EQ(save_third_with(dir.path(), fault), Ending::kDone) << fault;
  }
}

/// What a killed process has written is there; what a machine without power has written only if it
/// was synced.
TEST(InterruptedSave, LeavesWholeStepsAfterAPowerCutAtAnyCall) {
  const TemporaryFolder dir;
  save_two(dir.path());
  Disk disk(dir.path());
  std::vector<Change> list;
  {
    const Changes changes(dir.path());
    save_third(dir.path());
    list = changes.list();
  }
  const TemporaryFolder after;
  const fs::path out = after / "run";
  int committed = 0;
  for (const Change& change : list) {
    disk.apply(change);
    if (change.kind == Change::kWrite) {
      continue;  // it leaves nothing on the disk by itself
    }
    for (const Lost lost : {Lost::kAll, Lost::kBytes}) {
      disk.write_after_power_cut(out, lost);
      expect_whole_steps(out, std::to_string(&change - list.data()) + ": " + change.path);
      committed += fs::exists(out / kManifestOf3) ? 1 : 0;
    }
  }
  // The save has ended, and so the step exists.
  EXPECT_EQ(ExpectLoads(out, 3), 3);
  EXPECT_GT(committed, 10);
  EXPECT_GT(list.size(), 30U);
}

TEST(PowerCut, FindsAMissingSync) {
  const TemporaryFolder dir;
  save_two(dir.path());
  Disk disk(dir.path());
  const Changes changes(dir.path());
  save_third(dir.path());
  for (const Change& change : changes.list()) {
    if (change.kind != Change::kSync || !change.path.ends_with("step-00000003")) {
      disk.apply(change);
    }
  }
  const TemporaryFolder after;
  disk.write_after_power_cut(after / "run", Lost::kAll);
  EXPECT_FALSE(fs::exists(after / "run" / kManifestOf3));
}

TEST(InterruptedSave, AFailureOfOneRankIsThatOfAll) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  int failures = 0;
  for (const char* name : {"/step-00000002/.shard-00003", "/step-00000002/shard-00003",
                           "/step-00000002/.INCOMPLETE", "/step-00000002/.manifest"}) {
    for (const char* fault : {"openat:1:EDQUOT", "pwrite:1:EIO", "fsync:1:EIO", "rename:1:EIO"}) {
      const SystemCallFault planted(dir.path().string() + name, fault);
      const auto errors = ErrorsOfRanks(4, [&](Rank& rank) {
        SavedState state(rank, {2, 2}, 5);
        const SavedState before(rank, {2, 2}, 5);
        try {
          save(*rank.world(), dir.path(), 2, state.dict(), {.run_id = "this"});
        } catch (const Error&) {
          ExpectEqual(state.local(), before.local());
          throw;
        }
      });
      failures += errors.front().empty() ? 0 : 1;
      for (const std::string& error : errors) {
        EXPECT_EQ(error, errors.front()) << name << " " << fault;
      }
      // Where the fault was not met.
      std::filesystem::remove_all(dir / "step-00000002");
      EXPECT_EQ(ExpectLoads(dir.path(), 1), 1) << name << " " << fault;
    }
  }
  EXPECT_EQ(failures, 10);
}

constexpr const char* kDirVariable = "TESSERA_TEST_DIR";

/// Run in processes by the test below.
TEST(InterruptedSave, DISABLED_SaveAsOneOfFour) {
  const comm::WorldScope scope(comm::world_from_environment({.timeout = std::chrono::seconds(20)}));
  Rank rank(scope.world());
  SavedState state(rank, {2, 2}, 5);
  save(*rank.world(), std::getenv(kDirVariable), 2, state.dict());
}

TEST(InterruptedSave, EndsOnAllRanksWhenOneIsLost) {
  std::vector<std::pair<std::string, std::string>> phases = {
      {"3", "pwrite:2:kill"}, {"0", "rename:3:kill"}};  // in the shards; of the manifest
  if (every_fault()) {
    phases.insert(phases.end(), {{"0", "openat:1:kill"},
                                 {"0", "link:1:kill"},
                                 {"3", "openat:1:kill"},
                                 {"3", "fsync:1:kill"},
                                 {"3", "rename:1:kill"},
                                 {"3", "close:2:kill"},
                                 {"0", "fsync:7:kill"}});
  }
  for (const auto& [lost, fault] : phases) {
    const TemporaryFolder dir;
    SaveStep(dir.path(), 1, 1);
    const auto ended =
        testing::RunProcesses(4, "InterruptedSave.DISABLED_SaveAsOneOfFour",
                              {.environment = {{kDirVariable, dir.path().string()},
                                               {"TESSERA_FAULT", fault},
                                               {"TESSERA_FAULT_UNDER", dir.path().string()},
                                               {"TESSERA_FAULT_RANK", lost}}});
    for (std::size_t rank = 0; rank < ended.size(); ++rank) {
      if (std::to_string(rank) == lost) {
        EXPECT_EQ(ended[rank].signal, SIGKILL) << fault << ended[rank].output;
      } else {
        EXPECT_EQ(ended[rank].exit_code, 1) << fault << ended[rank].output;
      }
    }
    const bool second = fs::exists(dir / "step-00000002/manifest.json");
    EXPECT_EQ(ExpectLoads(dir.path(), second ? 5 : 1), second ? 2 : 1) << fault;
    ExpectLoads(dir / "step-00000001", 1);
  }
}

}  // namespace
}  // namespace tessera::checkpoint
