// Steps in a store that fails now and then, as stores do.
#include "tessera/checkpoint/object_store.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>

#include "saved_state.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::ErrorsOfRanks;
using testing::FilesIn;
using testing::TemporaryFolder;
using testing::WriteFile;

/// In memory. The first tries of each put and get fail as `fault` says.
class FaultyStore final : public ObjectStore {
 public:
  enum class Fault { kNone, kRefuses, kTruncates, kDamages };

  FaultyStore(Fault fault, int times) : fault_(fault), times_(times) {}

  void put(const std::filesystem::path& file, const std::string& key) override {
    const std::lock_guard lock(mutex_);
    order_.push_back(key);
    objects_[key] = taken(testing::ReadFile(file), "put " + key);
  }

  void get(const std::string& key, const std::filesystem::path& file) override {
    const std::lock_guard lock(mutex_);
    TESSERA_CHECK(objects_.contains(key), "404");
    std::ofstream(file, std::ios::binary) << taken(objects_.at(key), "get " + key);
  }

  std::vector<Object> list(const std::string& prefix) override {
    const std::lock_guard lock(mutex_);
    std::vector<Object> found;
    if (lists_nothing_) {
      return found;
    }
    for (const auto& [key, bytes] : objects_) {
      if (key.starts_with(prefix)) {
        found.push_back({key, bytes.size()});
      }
    }
    return found;
  }

  void remove(const std::string& key) { objects_.erase(key); }
  /// Every try with an object of such a key fails from now on.
  void fail_for(const std::string& part_of_key) { fails_ = part_of_key; }
  void recover() { times_ = 0; }
  /// The next tries of each get fail.
  void fail_gets(int times) {
    times_ = times;
    std::erase_if(tries_, [](const auto& call) { return call.first.starts_with("get "); });
  }
  /// As of a command whose status is lost.
  void list_nothing() { lists_nothing_ = true; }
  const std::vector<std::string>& order() const { return order_; }
  bool has(const std::string& key) const { return objects_.contains(key); }

 private:
  std::string taken(const std::string& bytes, const std::string& call) {
    const bool always = !fails_.empty() && call.find(fails_) != std::string::npos;
    if (fault_ == Fault::kNone || (tries_[call]++ >= times_ && !always)) {
      return bytes;
    }
    TESSERA_CHECK(fault_ != Fault::kRefuses, "503 Slow Down");
    if (fault_ == Fault::kDamages) {
      if (!call.ends_with(".safetensors")) {
        return bytes;
      }
      std::string damaged = bytes;
      damaged.back() = static_cast<char>(damaged.back() ^ 1);
      return damaged;
    }
    return bytes.substr(0, bytes.size() / 2);
  }

  Fault fault_;
  int times_;
  bool lists_nothing_ = false;
  std::string fails_;
  std::mutex mutex_;
  std::map<std::string, int> tries_;
  std::map<std::string, std::string> objects_;
  std::vector<std::string> order_;
};
using Fault = FaultyStore::Fault;

const TransferOptions kQuick{.pause = std::chrono::milliseconds(1)};
constexpr const char* kManifest = "runs/a/step-00000100/manifest.json";

void Push(FaultyStore& store, const std::filesystem::path& dir, int ranks = 4) {
  RunRanks(ranks, [&](Rank& rank) {
    EXPECT_EQ(push_step(*rank.world(), dir, store, "runs/a", kQuick), 100);
  });
}

TEST(ObjectStore, GivesBackTheStepThatWasPutThere) {
  for (const Fault fault : {Fault::kNone, Fault::kRefuses, Fault::kTruncates}) {
    for (const int ranks : {1, 3}) {
      const TemporaryFolder dir, other;
      SaveStep(dir.path(), 100, 3);
      FaultyStore store(fault, 2);
      Push(store, dir.path(), ranks);
      EXPECT_EQ(store.order().back(), kManifest);
      EXPECT_EQ(newest_step_in(store, "runs/a"), 100);
      RunRanks(ranks, [&](Rank& rank) {
        const auto folder = pull_step(*rank.world(), store, "runs/a", other.path(), {}, kQuick);
        EXPECT_EQ(folder, other / "step-00000100");
        EXPECT_EQ(FilesIn(folder), FilesIn(dir / "step-00000100"));
      });
      RunRanks(2, [&](Rank& rank) {
        SavedState loaded(rank, {2, 1}, -5000);
        load(*rank.world(), other.path(), loaded.dict());
        ExpectEqual(loaded.local(), SavedState(rank, {2, 1}, 3).local());
      });
    }
  }
}

TEST(ObjectStore, HasNoStepWhoseObjectsDidNotAllCome) {
  for (const Fault fault : {Fault::kRefuses, Fault::kTruncates}) {
    const TemporaryFolder dir, other;
    SaveStep(dir.path(), 100, 3);
    FaultyStore store(fault, 3);  // one more than is tried again
    const auto errors = ErrorsOfRanks(
        4, [&](Rank& rank) { push_step(*rank.world(), dir.path(), store, "runs/a", kQuick); });
    for (const std::string& error : errors) {
      EXPECT_CONTAINS(error, fault == Fault::kRefuses ? "503 Slow Down" : "bytes of 'runs/a/step-");
    }
    EXPECT_FALSE(store.has(kManifest));
    EXPECT_EQ(newest_step_in(store, "runs/a"), std::nullopt);
    RunRanks(1, [&](Rank& rank) {
      EXPECT_ERROR(pull_step(*rank.world(), store, "runs/a", other.path(), {}, kQuick),
                   "the store has no step below 'runs/a'");
    });
    // The same again, now that the store works: what is there is replaced.
    store.recover();
    Push(store, dir.path());
    EXPECT_EQ(newest_step_in(store, "runs/a"), 100);
  }
}

TEST(ObjectStore, LeavesNoFolderWhereAStepDidNotCome) {
  const TemporaryFolder dir, other;
  SaveStep(dir.path(), 100, 3);
  FaultyStore store(Fault::kTruncates, 0);
  Push(store, dir.path());
  for (const char* file : {"manifest.json", ".safetensors"}) {
    store.fail_for(file);
    const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
      pull_step(*rank.world(), store, "runs/a", other.path(), 100, kQuick);
    });
    EXPECT_CONTAINS(errors[1], file);
    EXPECT_EQ(FilesIn(other.path()), std::vector<std::string>());
  }
}

TEST(ObjectStore, GetsAgainWhatCameWithOtherBytes) {
  const TemporaryFolder dir, other;
  SaveStep(dir.path(), 100, 3);
  FaultyStore store(Fault::kDamages, 0);
  Push(store, dir.path());
  const auto pull = [&](int times) {
    store.fail_gets(times);
    return testing::message_of([&] {
      RunRanks(1, [&](Rank& rank) {
        pull_step(*rank.world(), store, "runs/a", other.path(), 100, kQuick);
      });
    });
  };
  EXPECT_CONTAINS(pull(3), "are not those that were written");
  EXPECT_EQ(FilesIn(other.path()), std::vector<std::string>());
  EXPECT_EQ(pull(2), "");
  EXPECT_EQ(FilesIn(other / "step-00000100"), FilesIn(dir / "step-00000100"));
}

TEST(ObjectStore, RefusesAStepThatIsThereThoughTheListIsEmpty) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 100, 3);
  FaultyStore store(Fault::kNone, 0);
  Push(store, dir.path());
  store.list_nothing();
  RunRanks(2, [&](Rank& rank) {
    EXPECT_ERROR(push_step(*rank.world(), dir.path(), store, "runs/a", kQuick),
                 "the store has 'runs/a/step-00000100/' already");
  });
  EXPECT_FALSE(std::filesystem::exists(dir / "step-00000100/manifest.json.there"));
}

TEST(ObjectStore, RefusesAStepThatIsThere) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 100, 3);
  FaultyStore store(Fault::kNone, 0);
  Push(store, dir.path());
  RunRanks(2, [&](Rank& rank) {
    EXPECT_ERROR(push_step(*rank.world(), dir.path(), store, "runs/a", kQuick),
                 "the store has 'runs/a/step-00000100/' already");
    EXPECT_ERROR(pull_step(*rank.world(), store, "runs/a", dir.path(), 100, kQuick),
                 "step-00000100");
  });
}

TEST(ObjectStore, TakesTheNewestStepWithAManifest) {
  const TemporaryFolder dir, other;
  SaveStep(dir.path(), 100, 3);
  SaveStep(dir.path(), 120, 4);
  FaultyStore store(Fault::kNone, 0);
  RunRanks(1, [&](Rank& rank) {
    push_step(*rank.world(), dir / "step-00000100", store, "", kQuick);
    push_step(*rank.world(), dir.path(), store, "", kQuick);
    EXPECT_EQ(newest_step_in(store, ""), 120);
    store.remove("step-00000120/manifest.json");
    EXPECT_EQ(pull_step(*rank.world(), store, "", other.path(), {}, kQuick),
              other / "step-00000100");
  });
}

TEST(CommandStore, RunsCommandsWithTheirWordsQuoted) {
  const TemporaryFolder dir, bucket, other;
  SaveStep(dir.path(), 100, 3);
  const std::string there = (bucket / "it's a \"bucket\"").string();
  std::filesystem::create_directory(there);
  ::setenv("BUCKET", there.c_str(), 1);
  const auto store = command_store(
      {.put = "mkdir -p \"$BUCKET\"/\"$(dirname {key})\" && cp {file} \"$BUCKET\"/{key}",
       .get = "cp \"$BUCKET\"/{key} {file}",
       .list = "cd \"$BUCKET\" && find . -type f -printf '%s %P\\n' | grep \" \"{key} || true"});
  RunRanks(1, [&](Rank& rank) {
    push_step(*rank.world(), dir.path(), *store, "a b", kQuick);
    EXPECT_EQ(newest_step_in(*store, "a b"), 100);
    pull_step(*rank.world(), *store, "a b", other.path(), {}, kQuick);
    EXPECT_EQ(FilesIn(other / "step-00000100"), FilesIn(dir / "step-00000100"));
  });
}

TEST(CommandStore, QuotesAKeyThatLooksLikeAFile) {
  const TemporaryFolder folder;
  WriteFile(folder / "in", "");
  const auto store = command_store({.put = "echo {key} {file} >&2; exit 1", .get = "", .list = ""});
  EXPECT_ERROR(store->put("the file", "a {file} b"), ": a {file} b the file");
}

/// A command takes longer than a rank is waited for that does nothing.
TEST(CommandStore, IsWaitedForByTheOtherRanks) {
  const TemporaryFolder dir, bucket;
  SaveStep(dir.path(), 100, 3);
  const std::string there = "'" + bucket.path().string() + "'";
  const auto store =
      command_store({.put = "case {key} in *shard-00001-model-00001*) sleep 1;; esac; mkdir -p " +
                            there + "/step-00000100 && cp {file} " + there + "/{key}",
                     .get = "exit 1",
                     .list = "cd " + there + " && find . -type f -printf '%s %P\\n'"});
  RunRanks(2, [&](Rank& rank) { push_step(*rank.world(), dir.path(), *store, "", kQuick); },
           {.world = {.timeout = std::chrono::milliseconds(600),
                      .watchdog = std::chrono::milliseconds(0)}});
  EXPECT_EQ(FilesIn(bucket / "step-00000100"), FilesIn(dir / "step-00000100"));
}

TEST(CommandStore, SaysWhatACommandSaid) {
  const TemporaryFolder folder;
  const auto store = command_store({.put = "echo so; echo no such bucket >&2; exit 3",
                                    .get = "kill -9 $$",
                                    .list = "echo nothing of bytes"});
  EXPECT_ERROR(store->put(folder.path(), "k"), "failed with exit code 3: no such bucket");
  EXPECT_ERROR(store->get("k", folder.path()), "'kill -9 $$' was ended by signal 9");
  EXPECT_ERROR(store->list("k"), "printed 'nothing of bytes', which is no line BYTES KEY");
}

}  // namespace
}  // namespace tessera::checkpoint
