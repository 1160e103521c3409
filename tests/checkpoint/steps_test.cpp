// Tests a run's checkpoint folders, the removal of old folders, manifests, and user objects.

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <limits>
#include <thread>

#include "checkpoint/known_model.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save.h"
#include "checkpoint/step_folder.h"
#include "checkpoint/stored_step.h"
#include "faults/system_calls.h"
#include "tessera/checkpoint/detail/run_folder.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/core/detail/files.h"
#include "testing/memory.h"

namespace tessera::checkpoint {
namespace {

TEST(ShardedCheckpoint, LoadsTheNewestValidStepOrAGivenStep) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 10);
  SaveStep(dir.path(), 2, 20);
  std::filesystem::create_directory(dir / "step-00000003");
  EXPECT_EQ(ExpectLoads(dir.path(), 20), 2);
  EXPECT_EQ(ExpectLoads(dir / "step-00000001", 10), 1);
  damage(dir / "step-00000002/manifest.json", 200);
  EXPECT_EQ(ExpectLoads(dir.path(), 10), 1);
  RunRanks(2, [&](Rank& rank) {
    EXPECT_EQ(newest_step(*rank.world(), dir.path()), 1);
    EXPECT_EQ(newest_step(*rank.world(), dir / "nowhere"), std::nullopt);
    EXPECT_ERROR(newest_step(*rank.world(), std::string(300, 'a')), "cannot read the folder");
  });
}

TEST(ShardedCheckpoint, LastStepIgnoresUnfinishedSaves) {
  const TemporaryFolder dir;
  const auto has = [&dir](const std::string& folder) {
    std::atomic<bool> found = false;
    RunRanks(
        2, [&](Rank& rank) { found = detail::last_step(*rank.world(), dir / folder).has_value(); });
    return found.load();
  };
  const auto killed = dir / "killed/step-00000001";
  EXPECT_FALSE(has("nowhere"));
  SaveStep(dir / "saved", 1);
  EXPECT_TRUE(has("saved"));
  WriteFile(dir / "saved/step-00000001/manifest.json", "damaged");
  EXPECT_TRUE(has("saved"));
  std::filesystem::create_directories(killed);
  EXPECT_FALSE(has("killed"));
  WriteFile(killed / "INCOMPLETE", "");
  WriteFile(killed / "shard-00000-model-00001-of-00001.safetensors", "");
  EXPECT_FALSE(has("killed"));
  std::filesystem::remove(killed / "INCOMPLETE");
  EXPECT_TRUE(has("killed"));
}

TEST(RunOfStep, RefusesAFolderOfTwoRuns) {
  const TemporaryFolder dir;
  const auto run_of = [&dir](std::int64_t step) {
    RunRanks(2,
             [&](Rank& rank) { EXPECT_EQ(run_of_step(*rank.world(), dir.path(), step), "this"); });
  };
  SaveStep(dir.path(), 1, 1, {.run_id = "this"});
  SaveStep(dir.path(), 3, 3, {.run_id = "this"});
  RunRanks(2, [&](Rank& rank) { EXPECT_NE(new_run_id(*rank.world()), new_run_id(*rank.world())); });
  run_of(3);
  SaveStep(dir.path(), 2, 2, {.run_id = "other"});
  EXPECT_ERROR(run_of(3), "two runs", "step-00000003 of run \"this\"", "step-00000002 of run");
  WriteFile(dir / "step-00000002/manifest.json", "damaged, so that its run is unknown");
  run_of(3);
  EXPECT_ERROR(run_of(4), "no checkpoint in", "step-00000004");
}

TEST(UnfinishedRun, IsReadFromTheIncompleteMarker) {
  const TemporaryFolder dir;
  const auto expect_left_by = [&dir](const std::optional<std::string>& run_id) {
    RunRanks(2, [&](Rank& rank) {
      EXPECT_EQ(detail::unfinished_run(*rank.world(), dir.path()), run_id);
    });
  };
  const auto begin = [&dir](const std::string& run_id) {
    RunRanks(2, [&](Rank& rank) {
      EXPECT_TRUE(detail::steps_to_withdraw(*rank.world(), dir.path(), -1, run_id).empty());
    });
  };
  expect_left_by(std::nullopt);
  std::filesystem::create_directory(dir / "step-00000002");
  expect_left_by(std::nullopt);
  begin("this");
  WriteFile(dir / "step-00000002/INCOMPLETE", "this");
  expect_left_by("this");
  begin("this");
  EXPECT_ERROR(begin("other"), "step-00000002'", "another run", "run \"this\"");
}

TEST(ShardedCheckpoint, SaveRemovesOldStepsOfTheSameRun) {
  const TemporaryFolder dir, lower;
  SaveStep(dir.path(), 1, 1, {.run_id = "another"});
  for (int step = 2; step <= 5; ++step) {
    SaveStep(dir.path(), step, step, {.run_id = "this", .keep = 2});
  }
  EXPECT_EQ(dir.files(), (Names{"step-00000001", "step-00000004", "step-00000005"}));
  EXPECT_ERROR(SaveStep(dir.path(), 6, 0, {.keep = 1}), "keep 2 steps or more");
  for (const int step : {200, 300, 150}) {
    SaveStep(lower.path(), step, step, {.keep = 2});
  }
  EXPECT_EQ(lower.files(), (Names{"step-00000150", "step-00000300"}));
}

TEST(ShardedCheckpoint, SaveKeepsStepsThatContainFoldersAndWarns) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  std::filesystem::create_directory(dir / "step-00000001/notes");
  HeardWarnings warnings;
  RunRanks(1, [&](Rank& rank) {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    for (const int step : {2, 3}) {
      SavedState state(rank, {1, 1}, step);
      save(*rank.world(), dir.path(), step, state.dict(), {.keep = 2});
    }
  });
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_CONTAINS(warnings.texts[0], "step-00000001'", "folder 'notes'", "move the folder away");
  EXPECT_EQ(ExpectLoads(dir / "step-00000001", 1), 1);
}

TEST(ShardedCheckpoint, DoesNotRemoveTheTargetOfALink) {
  const TemporaryFolder dir, archive;
  SaveStep(dir.path(), 1, 1);
  std::filesystem::copy(dir / "step-00000001", archive / "kept");
  std::filesystem::remove_all(dir / "step-00000001");
  std::filesystem::create_directory_symlink(archive / "kept", dir / "step-00000001");
  const Names files = FilesIn(archive / "kept");
  for (const int step : {2, 3}) {
    SaveStep(dir.path(), step, step, {.keep = 2});
  }
  EXPECT_EQ(ExpectLoads(dir / "step-00000001", 1), 1);
  EXPECT_EQ(dir.files(), (Names{"step-00000001", "step-00000002", "step-00000003"}));
  EXPECT_ERROR(detail::withdraw_step(dir.path(), 1, ""), "symbolic link", "remove the link");
  std::filesystem::remove(archive / "kept/manifest.json");
  WriteFile(archive / "kept/INCOMPLETE", "");
  EXPECT_ERROR(SaveStep(dir.path(), 1), "step-00000001' is not a folder");
  EXPECT_EQ(FilesIn(archive / "kept").size(), files.size());
}

TEST(ShardedCheckpoint, KeepsStepsMarkedIncompleteThatHaveAManifest) {
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

TEST(ShardedCheckpoint, SaveRefusesAStepThatExists) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  std::filesystem::create_directory(dir / "step-00000002");
  WriteFile(dir / "step-00000002/INCOMPLETE", "another");
  WriteFile(dir / "step-00000002/shard", "");
  WriteFile(dir / "step-00000003", "");
  EXPECT_ERROR(SaveStep(dir.path(), 1), "step-00000001' exists already");
  EXPECT_ERROR(SaveStep(dir.path(), 2), "step-00000002'", "another run");
  EXPECT_ERROR(SaveStep(dir.path(), 3), "step-00000003'", "not a folder");
  EXPECT_TRUE(std::filesystem::exists(dir / "step-00000002/shard"));
  WriteFile(dir / "step-00000002/INCOMPLETE", "");
  SaveStep(dir.path(), 2, 4);
  EXPECT_EQ(ExpectLoads(dir / "step-00000002", 4), 2);
}

/// The checkpoint has more files than a process may have open, so load() must also close files.
TEST(StoredStep, LoadsWithFewOpenFiles) {
  const TemporaryFolder dir;
  RunRanks(10, [&](Rank& rank) {
    SavedState state(rank, {5, 2}, 6);
    save(*rank.world(), dir.path(), 1, state.dict());
  });
  EXPECT_GT(read_manifest(dir / "step-00000001").files.size(), 15U);
  RunRanks(1, [&](Rank& rank) {
    SavedState loaded(rank, {1, 1}, -5000);
    const SavedState expected(rank, {1, 1}, 6);
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    const int next = dup(STDIN_FILENO);
    const rlimit few{static_cast<rlim_t>(next) + 4, before.rlim_max};
    close(next);
    setrlimit(RLIMIT_NOFILE, &few);
    const std::string error =
        testing::message_of([&] { load(*rank.world(), dir.path(), loaded.dict()); });
    setrlimit(RLIMIT_NOFILE, &before);
    EXPECT_EQ(error, "");
    ExpectEqual(loaded.local(), expected.local());
  });
}

constexpr std::int64_t kMebibyte = std::int64_t{1} << 20;

std::filesystem::path save_weight(const TemporaryFolder& dir, const at::Tensor& values) {
  RunRanks(1, [&](Rank& rank) {
    nn::Linear net(values.size(1), values.size(0), nn::LinearOptions{false});
    net.slot("weight")->set(values);
    save(*rank.world(), dir.path(), 1, {net});
  });
  return dir / "step-00000001";
}

TEST(StoredStep, ReadsWithBoundedMemory) {
  // In a tensor of sizes {2, 3 * kMebibyte}, a row is longer than piece_bytes.
  for (const auto& sizes : {std::vector<std::int64_t>{3072, 2048}, {2, 3 * kMebibyte}}) {
    const TemporaryFolder dir;
    const at::Tensor values = at::arange(6 * kMebibyte, at::kFloat).view(sizes);
    const std::filesystem::path folder = save_weight(dir, values);
    const at::Tensor target = at::zeros({values.size(1), values.size(0)}).t();
    const auto read = [&] {
      StoredStep step(folder, read_manifest(folder));
      step.want("weight", std::vector<std::int64_t>{0, 0}, target);
      const testing::MemoryScope memory;
      step.read({.threads = 4, .piece_bytes = kMebibyte});
      return memory.peak();
    };
    const std::int64_t peak = read();
    EXPECT_GE(peak, kMebibyte);
    EXPECT_LE(peak, 4 * kMebibyte);
    EXPECT_TRUE(target.equal(values));
    const auto path = folder / "shard-00000-model-00001-of-00001.safetensors";
    damage(path, 12 * kMebibyte + 500'000);
    EXPECT_ERROR(read(), "tensor 'weight': bytes 12582912 to");
  }
}

/// Reads half of each row, so that each thread reads many 1 MiB blocks, each with its own checksum.
TEST(StoredStep, ThreadsReadInParallel) {
  const TemporaryFolder dir;
  const at::Tensor values = at::arange(6 * kMebibyte, at::kFloat).view({3072, 2048});
  const std::filesystem::path folder = save_weight(dir, values);
  StoredStep step(folder, read_manifest(folder));
  const at::Tensor target = at::zeros({3072, 1024});
  step.want("weight", std::vector<std::int64_t>{0, 1024}, target);
  const testing::SystemCallFault fault(folder, "pread:1:slow");
  const auto begin = std::chrono::steady_clock::now();
  step.read({.threads = 3, .piece_bytes = 4 * kMebibyte});
  const auto took = std::chrono::steady_clock::now() - begin;
  // Each pread() takes 0.2 s. With overlapping calls, the load takes less than 0.12 s per pread().
  EXPECT_GT(testing::SystemCallFault::calls("pread"), 20);
  EXPECT_LT(took, std::chrono::milliseconds(120) * testing::SystemCallFault::calls("pread"));
  EXPECT_TRUE(target.equal(values.narrow(1, 1024, 1024)));
}

TEST(StepFolder, IsWrittenWithBoundedMemory) {
  const TemporaryFolder dir;
  // Tensors whose rows are not contiguous are copied before they are written.
  for (const at::Tensor& values :
       {at::zeros({2048, 6144}).t(), at::zeros({12 * kMebibyte, 2}).t().narrow(0, 1, 1)}) {
    const std::vector<ShardFile> files = {
        {"file", {{"weight", at::kFloat, {0, 0}, values.sizes().vec(), {{0, values}}}}}};
    const testing::MemoryScope memory;
    write_shards(dir.path(), files);
    EXPECT_GT(memory.peak(), kMebibyte);
    EXPECT_LE(memory.peak(), 33 * kMebibyte);
  }
}

TEST(StepFolder, IsClaimedByOneOfSeveralConcurrentRuns) {
  for (int attempt = 0; attempt < 5; ++attempt) {
    const TemporaryFolder dir;
    std::vector<std::string> errors(4);
    std::barrier start(4);
    std::vector<std::jthread> runs;
    for (int i = 0; i < 4; ++i) {
      runs.emplace_back([&, i] {
        start.arrive_and_wait();
        errors[static_cast<std::size_t>(i)] = testing::message_of(
            [&] { StepFolder(dir.path(), 7, "run " + std::to_string(i)).claim(); });
      });
    }
    runs.clear();
    EXPECT_EQ(std::ranges::count(errors, ""), 1);
    for (const std::string& error : errors) {
      EXPECT_TRUE(error.empty() || error.find("of another run") != error.npos) << error;
    }
    EXPECT_EQ(ReadFile(dir / "step-00000007/INCOMPLETE"),
              "run " + std::to_string(std::ranges::find(errors, "") - errors.begin()));
  }
}

using nlohmann::json;

constexpr std::uint64_t kLargest = std::numeric_limits<std::uint64_t>::max();

std::string Sealed(json root) {
  root.erase("crc32c");
  std::string text = root.dump();
  text.pop_back();
  const std::uint32_t sum = tessera::detail::crc32c(std::as_bytes(std::span(text)));
  return text + fmt::format(",\"crc32c\":\"{:08x}\"}}\n", sum);
}

TEST(HostileManifest, IsRefusedForInvalidContent) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const json valid = json::parse(ReadFile(dir / "step-00000001/manifest.json"));
  parse_manifest(Sealed(valid), "m");
  const std::string tensor = "/tensors/head.weight";
  struct Case {
    std::string at;
    json value;
    const char* error;
  };
  const std::vector<Case> cases = {
      {"/files/0/bytes", -1, "the size of a file: -1 is not an integer of at least 0"},
      {"/files/0/bytes", kLargest, "is too large"},
      {"/files/0/bytes", std::int64_t{1} << 62, "a number of checksums that does not fit"},
      {"/files/0/crc32c", "", "' has no checksums"},
      {"/files/0/name", "../x", "is not the name of a shard"},
      {"/step", -3, "the step: -3 is not"},
      {"/world_size", std::int64_t{1} << 32, "world_size is 4294967296, which is too large"},
      {"/mesh/sizes/0", -2, "the mesh: -2 is not"},
      {"/entries", json::array(), "\"entries\" is not a JSON object"},
      {tensor + "/sizes/0", -11, "tensor 'head.weight': its sizes: -11 is not"},
      {tensor + "/sizes", std::vector<int>(65, 1), "has 65 dimensions"},
      {tensor + "/sizes", {std::int64_t{1} << 62, 5}, "overflows"},
      {tensor + "/dtype", "F33", "its dtype 'F33' is unknown"},
      {tensor + "/tied", {"../x"}, "looks like a path"},
      {"/tensors/w\u202e", {}, "not valid: a tensor's name has a control character"},
      {tensor + "/chunks/0/file", 99, "a chunk is in file 99 of"},
      {tensor + "/chunks/0/offsets/0", -1, "a chunk's offsets: -1 is not"},
      {tensor + "/chunks/0/offsets/0", std::int64_t{1} << 62, "of dimension 0, but"},
      {tensor + "/chunks", json::array(), "its chunks have 0 elements"}};
  for (const Case& each : cases) {
    json changed = valid;
    changed[json::json_pointer(each.at)] = each.value;
    EXPECT_ERROR(parse_manifest(Sealed(changed), "m"), "the manifest 'm' is not valid", each.error);
  }
}

/// The manifest has a chunk for each corner of a 13-dimensional cube. Any two chunks have common
/// indices in some dimensions, but not in all.
TEST(HostileManifest, IsRefusedQuicklyForTooManyChunkComparisons) {
  constexpr int kDims = 13;
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  json root = json::parse(ReadFile(dir / "step-00000001/manifest.json"));
  json& tensor = root["tensors"]["head.weight"];
  tensor["sizes"] = std::vector<int>(kDims, 2);
  tensor["chunks"] = json::array();
  for (int corner = 0; corner < 1 << kDims; ++corner) {
    std::vector<int> offsets;
    for (int dim = 0; dim < kDims; ++dim) {
      offsets.push_back(corner >> dim & 1);
    }
    tensor["chunks"].push_back(
        {{"file", 0}, {"offsets", offsets}, {"sizes", std::vector<int>(kDims, 1)}});
  }
  EXPECT_ERROR(parse_manifest(Sealed(root), "m"),
               "tensor 'head.weight': its 8192 chunks take more than 40000000 comparisons");
}

TEST(HostileShards, AreRefusedForInvalidOffsets) {
  for (const auto& [info, error] :
       {std::pair{R"({"w":{"saved_offsets":[-1]}})", "its saved_offsets: -1 is not"},
        {R"({"w":{"saved_offsets":[9223372036854775807]}})", "begins at 9223372036854775807"},
        {R"({"w":{"saved_offsets":[0,0]}})", "the number of dimensions"},
        {R"({"w":{"saved_offsets":{}}})", "its saved_offsets is not a list"},
        {R"({"w":[]})", "DCP_SHARDING_INFO"},
        {R"({})", "no tensor 'w'"},
        {R"([])", "does not begin with '{'"},
        {R"({"w":{"saved_offsets":[3]}})", "its chunks have 2 elements, not 5"}}) {
    const TemporaryFolder dir;
    SafetensorsWriter writer(dir / "shard-00000-model-00001-of-00001.safetensors",
                             {{"w", at::kFloat, {2}}}, {{"DCP_SHARDING_INFO", info}});
    writer.write("w", at::ones({2}));
    writer.finish();
    EXPECT_ERROR(compare_steps(dir.path(), dir.path()), dir.path().string(), error);
  }
}

struct Schedule final : Stateful {
  explicit Schedule(double factor) : factor(factor) {}
  nlohmann::json state_dict() const override { return {{"factor", factor}}; }
  void load_state_dict(const nlohmann::json& state) override { factor = state.at("factor"); }
  double factor;
};

/// A RankState with one integer. A load on another number of ranks gives rank 0 the integers' sum.
struct Count final : RankState {
  explicit Count(int value) : value(value), initial(value) {}
  nlohmann::json state_dict() const override { return value; }
  void load_state_dict(const nlohmann::json& state) override { value = state; }
  nlohmann::json merged(const std::vector<nlohmann::json>& of_ranks) const override {
    int sum = 0;
    for (const nlohmann::json& state : of_ranks) {
      sum += state.get<int>();
    }
    return sum;
  }
  void reset() override { value = initial; }
  int value, initial;
};

using NamedStateful = std::vector<std::pair<std::string, Stateful*>>;
using NamedRankStates = std::vector<std::pair<std::string, RankState*>>;

StateDict with_objects(nn::ModuleBase& model, NamedStateful stateful, NamedRankStates ranks = {}) {
  return {.model = model, .stateful = std::move(stateful), .rank_states = std::move(ranks)};
}

std::unique_ptr<Net> net_on(Rank& rank, int add = 0) {
  auto net = std::make_unique<Net>();
  Distribute(*net, rank.mesh({rank.size(), 1}, {"dp", "tp"}), Values(add));
  return net;
}

TEST(Objects, AreSavedByRank0AndLoadedOnAllRanks) {
  const TemporaryFolder dir;
  RunRanks(2, [&](Rank& rank) {
    const auto net = net_on(rank);
    Schedule schedule(0.25 + rank.rank());
    SaveFuture pending =
        async_save(*rank.world(), dir.path(), 1, with_objects(*net, {{"schedule", &schedule}}));
    schedule.factor = 7;
    pending.wait();
    load(*rank.world(), dir.path(), with_objects(*net, {{"schedule", &schedule}}));
    EXPECT_EQ(schedule.factor, 0.25);
  });
  EXPECT_CONTAINS(describe_step(dir / "step-00000001"), R"(object "schedule" {"factor":0.25})");
}

TEST(Objects, LoadChangesNothingIfAnObjectDoesNotMatch) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    Schedule schedule(1);
    save(*rank.world(), dir.path(), 1, with_objects(*net_on(rank), {{"schedule", &schedule}}));
  });
  const auto errors = [&](const NamedStateful& objects) {
    const auto all = ErrorsOfRanks(2, [&](Rank& rank) {
      const auto net = net_on(rank, 9);
      ExpectUnchangedByError(*net,
                             [&] { load(*rank.world(), dir.path(), with_objects(*net, objects)); });
    });
    EXPECT_EQ(all[0], all[1]);
    return all[0];
  };
  Schedule other(2);
  EXPECT_CONTAINS(errors({{"other", &other}}), "missing: other; unexpected: schedule");
  struct Strict final : Stateful {
    nlohmann::json state_dict() const override { return {}; }
    void load_state_dict(const nlohmann::json& state) override { state.at("rate"); }
  } strict;
  EXPECT_CONTAINS(errors({{"schedule", &strict}}),
                  "the state of 'schedule' in the checkpoint cannot be loaded: ", "'rate'");
  RunRanks(1, [&](Rank& rank) {
    const auto net = net_on(rank);
    const auto load_other = [&](const LoadOptions& options) {
      return load(*rank.world(), dir.path(), with_objects(*net, {{"other", &other}}), options);
    };
    EXPECT_EQ(load_other({.partial = {"**"}}).missing, Names{"other"});
    EXPECT_TRUE(load_other({.exclude = {"other", "sch*"}}).missing.empty());
    EXPECT_EQ(other.factor, 2);
  });
}

TEST(Objects, NeedUniqueNamesAndJsonStates) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    const auto net = net_on(rank);
    Schedule one(1), infinite(std::numeric_limits<double>::infinity());
    Count count(0);
    const auto saving = [&](const NamedStateful& stateful, const NamedRankStates& ranks = {}) {
      return [&, stateful, ranks] {
        save(*rank.world(), dir.path(), 1, with_objects(*net, stateful, ranks));
      };
    };
    testing::expect_refusals(
        {{"twice", saving({{"a", &one}}, {{"a", &count}}), {"two objects named 'a'"}},
         {"no name", saving({{"", &one}}), {"without a name"}},
         {"not UTF-8", saving({{"\xff", &one}}), {"the name of an object"}},
         {"infinity", saving({{"a", &infinite}}), {"'a'", "/factor"}}});
  });
  const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
    Count count(0);
    const std::string name = rank.rank() == 0 ? "count" : "counts";
    save(*rank.world(), dir.path(), 1, with_objects(*net_on(rank), {}, {{name, &count}}));
  });
  EXPECT_CONTAINS(errors, "ranks 1", "objects");
}

TEST(RankStates, AreLoadedOnTheirRanksOrMergedOnRank0) {
  const TemporaryFolder dir;
  const std::vector<int> saved{1, 10, 100};
  RunRanks(3, [&](Rank& rank) {
    Count count(0);
    count.value = saved[static_cast<std::size_t>(rank.rank())];
    save(*rank.world(), dir.path(), 1, with_objects(*net_on(rank), {}, {{"count", &count}}));
    EXPECT_EQ(count.value, saved[static_cast<std::size_t>(rank.rank())]);
  });
  for (const auto& loaded : {saved, {111}, {111, 0, 0, 0}}) {
    RunRanks(static_cast<int>(loaded.size()), [&](Rank& rank) {
      Count count(0);
      count.value = 5;
      load(*rank.world(), dir.path(), with_objects(*net_on(rank), {}, {{"count", &count}}));
      EXPECT_EQ(count.value, loaded[static_cast<std::size_t>(rank.rank())]) << loaded.size();
    });
  }
}

TEST(RankStates, AreResetIfNotSaved) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  EXPECT_FALSE(testing::Contains(ReadFile(dir / "step-00000001/manifest.json"), {"rank_states"}));
  RunRanks(2, [&](Rank& rank) {
    Count count(3), excluded(3);
    count.value = excluded.value = 8;
    const LoadReport report =
        load(*rank.world(), dir.path(),
             with_objects(*net_on(rank), {}, {{"count", &count}, {"excluded", &excluded}}),
             {.exclude = {"optimizer.**", "excluded"}});
    EXPECT_EQ(count.value, 3);
    EXPECT_EQ(excluded.value, 8);
    EXPECT_EQ(report.missing, Names{"count"});
  });
}

}  // namespace
}  // namespace tessera::checkpoint
