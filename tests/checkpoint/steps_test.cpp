// The steps of a folder: which is loaded, which are kept, and what may not be written over.

#include <filesystem>
#include <mutex>
#include <optional>
#include <set>

#include "checkpoint/heard_warnings.h"
#include "saved_state.h"
#include "tessera/checkpoint/inspect.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using Names = std::vector<std::string>;
using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

TEST(ShardedCheckpoint, LoadsTheNewestValidStepOrTheOneNamed) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 10);
  SaveStep(dir.path(), 2, 20);
  std::filesystem::create_directory(dir / "step-00000003");
  EXPECT_EQ(ExpectLoads(dir.path(), 20), 2);
  EXPECT_EQ(ExpectLoads(dir / "step-00000001", 10), 1);
  std::string manifest = ReadFile(dir / "step-00000002/manifest.json");
  manifest[manifest.size() / 2] ^= 1;
  WriteFile(dir / "step-00000002/manifest.json", manifest);
  EXPECT_EQ(ExpectLoads(dir.path(), 10), 1);
  RunRanks(2, [&](Rank& rank) {
    EXPECT_EQ(newest_step(*rank.world(), dir.path()), 1);
    EXPECT_EQ(newest_step(*rank.world(), dir / "nowhere"), std::nullopt);
  });
}

TEST(ShardedCheckpoint, TellsAFolderOfStepsFromTheRemainsOfASave) {
  const TemporaryFolder dir;
  const auto has = [&dir](const std::string& folder) {
    bool found = false;
    RunRanks(2, [&](Rank& rank) {
      const bool here = last_step(*rank.world(), dir / folder).has_value();
      if (rank.world()->rank() == 0) {
        found = here;
      }
    });
    return found;
  };
  EXPECT_FALSE(has("nowhere"));
  SaveStep(dir / "saved", 1);
  EXPECT_TRUE(has("saved"));
  WriteFile(dir / "saved/step-00000001/manifest.json", "{}");
  EXPECT_TRUE(has("saved"));  // damaged
  std::filesystem::create_directories(dir / "killed/step-00000001");
  EXPECT_FALSE(has("killed"));
  WriteFile(dir / "killed/step-00000001/INCOMPLETE", "");
  WriteFile(dir / "killed/step-00000001/shard-00000-model-00001-of-00001.safetensors", "");
  EXPECT_FALSE(has("killed"));
  std::filesystem::remove(dir / "killed/step-00000001/INCOMPLETE");
  EXPECT_TRUE(has("killed"));  // a copy without its manifest
}

TEST(Runs, AreDrawnByOneRankForAll) {
  std::set<std::string> drawn;
  std::mutex mutex;
  for (int run = 0; run < 2; ++run) {
    RunRanks(3, [&](Rank& rank) {
      const std::string run_id = new_run_id(*rank.world());
      const std::lock_guard lock(mutex);
      drawn.insert(run_id);
    });
  }
  EXPECT_EQ(drawn.size(), 2U);
}

TEST(Runs, AreOneInAFolder) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1, {.run_id = "this"});
  SaveStep(dir.path(), 3, 3, {.run_id = "this"});
  const auto run_of = [&dir](std::int64_t step) {
    RunRanks(2,
             [&](Rank& rank) { EXPECT_EQ(run_of_step(*rank.world(), dir.path(), step), "this"); });
  };
  run_of(3);
  SaveStep(dir.path(), 2, 2, {.run_id = "other"});
  EXPECT_ERROR(run_of(3),
               "has steps of two runs: step-00000003 of run \"this\", step-00000002 of run",
               "move those of one of them away");
  WriteFile(dir / "step-00000002/manifest.json", "{}");  // its run is not known
  run_of(3);
  EXPECT_ERROR(run_of(4), "no checkpoint in", "step-00000004");
}

TEST(Runs, AreKnownByWhatTheirUnfinishedSavesHaveLeft) {
  const TemporaryFolder dir;
  const auto left_by = [&dir] {
    std::optional<std::string> run_id;
    RunRanks(2, [&](Rank& rank) {
      const auto found = unfinished_run(*rank.world(), dir.path());
      run_id = rank.rank() == 0 ? found : run_id;
    });
    return run_id;
  };
  const auto begin = [&dir](const std::string& run_id) {
    RunRanks(2, [&](Rank& rank) {
      EXPECT_TRUE(steps_to_withdraw(*rank.world(), dir.path(), -1, run_id).empty());
    });
  };
  EXPECT_EQ(left_by(), std::nullopt);
  std::filesystem::create_directory(dir / "step-00000002");
  EXPECT_EQ(left_by(), std::nullopt);
  begin("this");
  WriteFile(dir / "step-00000002/INCOMPLETE", "this");
  EXPECT_EQ(left_by(), "this");
  begin("this");
  EXPECT_ERROR(begin("other"), "step-00000002' is the unfinished save of another run, run \"this\"",
               "remove it first");
}

TEST(ShardedCheckpoint, KeepsTheNewestStepsOfItsRun) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1, {.run_id = "another"});
  for (int step = 2; step <= 5; ++step) {
    SaveStep(dir.path(), step, step, {.run_id = "this", .keep = 2});
  }
  EXPECT_EQ(dir.files(), (Names{"step-00000001", "step-00000004", "step-00000005"}));
  EXPECT_ERROR(SaveStep(dir.path(), 6, 0, {.keep = 1}), "keep 2 steps or more");
}

TEST(ShardedCheckpoint, KeepsTheStepJustSavedBelowHigherOnes) {
  const TemporaryFolder dir;
  for (const int step : {200, 300, 150}) {
    SaveStep(dir.path(), step, step, {.keep = 2});
  }
  EXPECT_EQ(dir.files(), (Names{"step-00000150", "step-00000300"}));
}

TEST(ShardedCheckpoint, RemovesOtherStepsWhereOneCannotBeRemoved) {
  const TemporaryFolder dir;
  for (int step = 1; step <= 3; ++step) {
    SaveStep(dir.path(), step, step);
  }
  std::filesystem::create_directory(dir / "step-00000002/notes");
  SaveStep(dir.path(), 4, 4, {.keep = 2});
  EXPECT_EQ(dir.files(), (Names{"step-00000002", "step-00000003", "step-00000004"}));
}

TEST(ShardedCheckpoint, LeavesAStepWithAFolderWholeAndSaysSoOnce) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  std::filesystem::create_directory(dir / "step-00000001/notes");
  HeardWarnings warnings;
  RunRanks(1, [&](Rank& rank) {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    for (const int step : {2, 3, 4}) {
      SavedState state(rank, {1, 1}, step);
      save(*rank.world(), dir.path(), step, state.dict(), {.keep = 2});
    }
  });
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_CONTAINS(warnings.texts[0], "step-00000001' could not be cleaned up",
                  "it has the folder 'notes', which no save makes: move that away");
  EXPECT_EQ(ExpectLoads(dir / "step-00000001", 1), 1);
  EXPECT_EQ(dir.files(), (Names{"step-00000001", "step-00000003", "step-00000004"}));
}

TEST(ShardedCheckpoint, LeavesWhatALinkLeadsTo) {
  const TemporaryFolder dir, archive;
  SaveStep(dir.path(), 1, 1);
  std::filesystem::copy(dir / "step-00000001", archive / "kept");
  std::filesystem::remove_all(dir / "step-00000001");
  std::filesystem::create_directory_symlink(archive / "kept", dir / "step-00000001");
  const Names files = testing::FilesIn(archive / "kept");
  for (const int step : {2, 3}) {
    SaveStep(dir.path(), step, step, {.keep = 2});
  }
  EXPECT_EQ(ExpectLoads(dir / "step-00000001", 1), 1);
  EXPECT_EQ(dir.files(), (Names{"step-00000001", "step-00000002", "step-00000003"}));
  EXPECT_ERROR(withdraw_step(dir.path(), 1, ""), "a symbolic link: remove the link");
  std::filesystem::remove(archive / "kept/manifest.json");
  WriteFile(archive / "kept/INCOMPLETE", "");
  EXPECT_ERROR(SaveStep(dir.path(), 1), "is not a folder: move it away");
  EXPECT_EQ(testing::FilesIn(archive / "kept").size(), files.size());
}

TEST(ShardedCheckpoint, LeavesMarkedStepsWhoseManifestIsThere) {
  const TemporaryFolder dir;
  for (int step = 1; step <= 2; ++step) {
    SaveStep(dir.path(), step);
    WriteFile(dir / ("step-0000000" + std::to_string(step)) / "INCOMPLETE", "");
  }
  WriteFile(dir / "step-00000002/manifest.json", "not readable for the moment");
  SaveStep(dir.path(), 3);
  EXPECT_FALSE(std::filesystem::exists(dir / "step-00000001/INCOMPLETE"));
  EXPECT_EQ(dir.files(), (Names{"step-00000001", "step-00000002", "step-00000003"}));
}

TEST(ShardedCheckpoint, RefusesAFileInThePlaceOfAStep) {
  const TemporaryFolder dir;
  WriteFile(dir / "step-00000002", "");
  EXPECT_ERROR(SaveStep(dir.path(), 2),
               "step-00000002' is where the step goes, and is not a folder: move it away");
}

TEST(ShardedCheckpoint, RefusesAStepThatExistsOrIsAnothersUnfinishedOne) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  EXPECT_ERROR(SaveStep(dir.path(), 1), "step-00000001' exists already");
  std::filesystem::create_directory(dir / "step-00000002");
  WriteFile(dir / "step-00000002/INCOMPLETE", "another");
  WriteFile(dir / "step-00000002/shard", "");
  EXPECT_ERROR(SaveStep(dir.path(), 2), "is the unfinished save of another run");
  EXPECT_TRUE(std::filesystem::exists(dir / "step-00000002/shard"));
  WriteFile(dir / "step-00000002/INCOMPLETE", "");
  SaveStep(dir.path(), 2, 4);
  EXPECT_EQ(ExpectLoads(dir.path(), 4), 2);
}

}  // namespace
}  // namespace tessera::checkpoint
