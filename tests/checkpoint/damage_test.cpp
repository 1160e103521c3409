// Tests damaged files of checkpoints, interrupted saves, and the functions of tessera-ckpt.

#include <signal.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "checkpoint/known_model.h"
#include "checkpoint/manifest.h"
#include "checkpoint/ranks.h"
#include "checkpoint/safetensors_bytes.h"
#include "faults/changes.h"
#include "faults/system_calls.h"
#include "tessera/checkpoint/detail/run_folder.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/core/detail/files.h"
#include "testing/processes.h"

namespace tessera::checkpoint {
namespace {

TEST(DamagedStep, IsDetectedFromAnyByteOfTheManifest) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const auto path = dir / "step-00000001/manifest.json";
  const std::string text = ReadFile(path);
  parse_manifest(text, path);
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string flipped = text;
    flipped[i] ^= static_cast<char>(1 << (i % 8));
    ASSERT_TRUE(testing::Throws<Error>([&] { parse_manifest(flipped, path); },
                                       {"manifest.json' is not valid"}))
        << i;
  }
  EXPECT_ERROR(parse_manifest(text.substr(0, text.size() - 1), path), "is not valid");
}

std::shared_ptr<nn::Linear> ones(std::int64_t columns, std::int64_t rows, bool bias = true) {
  auto net = std::make_shared<nn::Linear>(columns, rows, nn::LinearOptions{bias});
  for (const auto& [name, slot] : net->named_slots()) {
    slot->set(at::ones_like(slot->get()));
  }
  return net;
}

TEST(DamagedStep, IsDetectedFromAnyByteOfAShard) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const FileRecord file = read_manifest(dir / "step-00000001").files.front();
  const auto path = dir / "step-00000001" / file.name;
  const auto open = [&] { SafetensorsFile(path, Symlinks::kRefuse, file.sums); };
  const std::string bytes = ReadFile(path);
  std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&stream](std::size_t at, char byte) {
    stream.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
  };
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    put(i, static_cast<char>(bytes[i] ^ (1 << (i % 8))));
    ASSERT_TRUE(testing::Throws<Error>(open, {file.name, "differ from the saved bytes"})) << i;
    put(i, bytes[i]);
  }
  open();
}

TEST(DamagedStep, IsRefusedOnAllRanksWithoutChangingTheModel) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const auto path = dir / "step-00000001/shard-00002-model-00001-of-00002.safetensors";
  const std::string bytes = ReadFile(path);
  const auto expect = [&](const std::string& part) {
    const auto errors = ErrorsOfRanks(4, [&](Rank& rank) {
      SavedState state(rank, {4, 1}, 9);
      try {
        ExpectUnchangedByError(state, [&] { load(*rank.world(), dir.path(), state.dict()); });
      } catch (const Error&) {
        EXPECT_TRUE(state.net.middle->slot("bias")->initialized());
        throw;
      }
    });
    EXPECT_CONTAINS(errors, "shard-00002-model-00001", part);
    EXPECT_EQ(errors, std::vector<std::string>(4, errors[0]));
  };
  WriteFile(path, bytes.substr(0, bytes.size() - 1));
  expect("the manifest says");
  std::filesystem::remove(path);
  expect("No such file");
  WriteFile(path, bytes);
  damage(path, 20);
  expect("differ from the saved bytes");
}

/// Rank 1 throws `error` while both ranks read. Returns whether both ranks throw DamagedStep.
template <class Failure>
bool IsDamage(const Failure& error) {
  std::atomic<int> ranks = 0;
  RunRanks(2, [&](Rank& rank) {
    try {
      read_or_fail_on_all(*rank.world(), [&] {
        if (rank.rank() == 1) {
          throw error;
        }
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const checkpoint::DamagedStep&) {
      ++ranks;
    } catch (const Error&) {
    }
  });
  EXPECT_TRUE(ranks == 0 || ranks == 2) << ranks;
  return ranks == 2;
}

TEST(DamagedStep, IsThrownForWrongContentNotForUnreadableFiles) {
  const TemporaryFolder dir;
  WriteFile(dir / "there", "");
  EXPECT_TRUE(IsDamage(Error("other bytes")));
  EXPECT_TRUE(IsDamage(tessera::detail::ReadError("no such file", dir / "gone")));
  EXPECT_FALSE(IsDamage(tessera::detail::ReadError("no such file on this rank", dir / "there")));
  EXPECT_FALSE(IsDamage(tessera::detail::ReadError("too many open files")));
  EXPECT_FALSE(IsDamage(std::bad_alloc()));
  SaveStep(dir.path(), 1);
  const auto path = dir / "step-00000001/shard-00002-model-00001-of-00002.safetensors";
  std::filesystem::rename(path, dir / "elsewhere");
  std::filesystem::create_symlink(dir / "elsewhere", path);
  for (const std::string& error : ErrorsOfRanks(1, [&](Rank& rank) {
         SavedState state(rank, {1, 1});
         try {
           load(*rank.world(), dir.path(), state.dict());
         } catch (const checkpoint::DamagedStep&) {
           ADD_FAILURE() << "a link to the file is no damage";
           throw;
         }
       })) {
    EXPECT_CONTAINS(error, "shard-00002-model-00001", "is a symbolic link");
  }
}

TEST(DamagedStep, LeavesTheModelUninitialized) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    const auto net = ones(1024, 1024);
    save(*rank.world(), dir.path(), 1, {*net});
    damage(dir / "step-00000001/shard-00000-model-00001-of-00001.safetensors");
    EXPECT_ERROR(load(*rank.world(), dir.path(), {*net}), "tensor 'weight': bytes 4194304 to",
                 "shard-00000-model-00001", "load another step");
    EXPECT_FALSE(net->slot("bias")->initialized());
  });
}

TEST(DamagedStep, IsSkippedOnAllRanksAndSavedAgain) {
  const TemporaryFolder dir;
  const SaveOptions options{.run_id = "run", .keep = 2};
  SaveStep(dir.path(), 1, 1, options);
  SaveStep(dir.path(), 2, 2, options);
  std::filesystem::resize_file(dir / "step-00000002/shard-00003-model-00001-of-00002.safetensors",
                               100);
  RunRanks(2, [&](Rank& rank) {
    SavedState state(rank, {2, 1});
    EXPECT_THROWN(checkpoint::DamagedStep, load(*rank.world(), dir.path(), state.dict()),
                  "shard-00003", "has 100 bytes");
    const auto older = newest_step(*rank.world(), dir.path(), 2);
    EXPECT_EQ(older, 1);
    load(*rank.world(), dir / "step-00000001", state.dict());
  });
  EXPECT_ERROR(detail::withdraw_step(dir.path(), 2, "other"), "is a damaged step of another run");
  detail::withdraw_step(dir.path(), 2, "run");
  EXPECT_EQ(ExpectLoads(dir.path(), 1), 1);
  SaveStep(dir.path(), 2, 3, options);
  EXPECT_EQ(ExpectLoads(dir.path(), 3), 2);
  ExpectLoads(dir / "step-00000001", 1);
}

TEST(DamagedStep, DoesNotAffectParametersExcludedFromTheLoad) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    const auto net = ones(1024, 1024, /*bias=*/false);
    const StateDict state{*net, {{"weight.exp_avg", at::ones({1024, 1024})}}};
    save(*rank.world(), dir.path(), 1, state);
    const char* name = "optimizer.state.weight.exp_avg";
    const Manifest manifest = read_manifest(dir / "step-00000001");
    const std::size_t file = manifest.tensors.at(name).chunks.front().file;
    const auto path = dir / "step-00000001" / manifest.files[file].name;
    const TensorEntry entry = SafetensorsFile(path).entry(name);
    damage(path, static_cast<std::int64_t>(entry.offset + entry.bytes) - 1);
    EXPECT_ERROR(load(*rank.world(), dir.path(), state, {.exclude = {"weight"}}), name, "bytes");
    EXPECT_TRUE(net->slot("weight")->initialized());
  });
}

constexpr const char* kFirstFile = "shard-00000-model-00001-of-00002.safetensors";

TEST(InspectStep, DescribesTheNewestStep) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  RunRanks(4, [&](Rank& rank) {
    SavedState state(rank, {2, 2});
    StateDict dict = state.dict();
    dict.entries = {{"note", "\u009b2J\u202e"}};
    save(*rank.world(), dir.path(), 2, dict);
  });
  EXPECT_EQ(find_step(dir.path()), dir / "step-00000002");
  EXPECT_CONTAINS(describe_step(find_step(dir.path())), R"(step 2 of run "")",
                  "4 ranks on the mesh (2, 2)", "head.weight F32 [11, 5] in 4 chunks",
                  R"({"note":"\u009b2J\u202e"})");
}

TEST(InspectStep, VerifyNamesDamagedTensorsAndBytes) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const auto step = dir / "step-00000001";
  EXPECT_TRUE(verify_step(step).empty());
  damage(step / kFirstFile);
  WriteFile(step / "stray.safetensors", "");
  std::filesystem::remove(step / "shard-00003-model-00001-of-00002.safetensors");
  const auto faults = verify_step(step);
  ASSERT_EQ(faults.size(), 3u);
  EXPECT_CONTAINS(faults[0], "bytes 0 to ", kFirstFile, "'middle.weight' from byte 0");
  EXPECT_CONTAINS(faults[1], "cannot open", "shard-00003-model-00001");
  EXPECT_CONTAINS(faults[2], "stray.safetensors' is not in the manifest");
}

TEST(InspectStep, RefusesAManifestThatIsALink) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const auto manifest = dir / "step-00000001/manifest.json";
  std::filesystem::rename(manifest, dir / "elsewhere");
  std::filesystem::create_symlink(dir / "elsewhere", manifest);
  EXPECT_ERROR(verify_step(dir / "step-00000001"), "manifest.json' is a symbolic link");
  EXPECT_ERROR(ExpectLoads(dir / "step-00000001", 0), "manifest.json' is a symbolic link");
}

class Counted : public nn::Module<Counted> {
 public:
  explicit Counted(const at::Tensor& count) { register_buffer("count", count.clone()); }
};

TEST(CompareSteps, FindsStepsOfDifferentMeshesEqual) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 3);
  RunRanks(3, [&](Rank& rank) {
    SavedState state(rank, {3, 1}, 3);
    save(*rank.world(), dir.path(), 2, state.dict());
  });
  EXPECT_EQ(compare_steps(dir / "step-00000001", dir / "step-00000002"),
            std::vector<std::string>{});
}

TEST(CompareSteps, ReportsDifferentNamesSizesTypesAndValues) {
  const TemporaryFolder dir;
  const auto weight = [](const std::vector<float>& values) {
    return at::tensor(values).view({3, 2});
  };
  RunRanks(1, [&](Rank& rank) {
    nn::Linear one(2, 3);
    one.slot("weight")->set(weight({1, 2, 4, 0, 5, NAN}));
    one.slot("bias")->set(at::ones({3}));
    save(*rank.world(), dir.path(), 1, {one});
    nn::Linear other(2, 3, nn::LinearOptions{false});
    other.slot("weight")->set(weight({1, 2.5, 3, 0, 5, NAN}).to(at::kBFloat16));
    save(*rank.world(), dir.path(), 2, {other});
    nn::Linear infinite(2, 4);
    infinite.slot("weight")->set(at::ones({4, 2}));
    infinite.slot("bias")->set(at::ones({4}));
    save(*rank.world(), dir.path(), 3, {infinite});
    one.slot("weight")->set(weight({1, 2, 4, 0, 5, 6}));
    save(*rank.world(), dir.path(), 4, {one});
  });
  const auto compare = [&](int a, int b) {
    return compare_steps(dir / ("step-0000000" + std::to_string(a)),
                         dir / ("step-0000000" + std::to_string(b)));
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(compare(1, 2), (Lines{"bias: only in the first",
                                  "weight: F32 and BF16; largest difference 1, relative 0.25"}));
  EXPECT_EQ(compare(2, 1)[0], "bias: only in the second");
  EXPECT_EQ(compare(1, 3), (Lines{"bias: [3] and [4]", "weight: [3, 2] and [4, 2]"}));
  EXPECT_EQ(compare(1, 4), Lines{"weight: largest difference inf, relative inf"});
}

TEST(CompareSteps, HandlesLargeIntegersComplexNumbersAndFp8) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 60;
  const auto numbers = at::ones({2});
  const auto line = [](const at::Tensor& a, const at::Tensor& b) {
    const TemporaryFolder dir;
    RunRanks(1, [&](Rank& rank) {
      for (const auto& [step, values] : {std::pair{1, a}, {2, b}}) {
        Counted net(values);
        save(*rank.world(), dir.path(), step, {net});
      }
    });
    return compare_steps(dir / "step-00000001", dir / "step-00000002");
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(line(at::tensor({kLarge}), at::tensor({kLarge + 3})),
            Lines{"count: largest difference 0, relative 0"});  // fp64 rounds kLarge + 3 to kLarge
  EXPECT_EQ(line(at::complex(numbers, numbers), at::complex(numbers, numbers * 3)),
            Lines{"count: largest difference 2, relative 0.632456"});
  EXPECT_EQ(line(at::complex(numbers, numbers), at::complex(numbers, numbers)), Lines{});
  EXPECT_EQ(line(numbers * 2, numbers.to(at::kFloat8_e4m3fn)),
            Lines{"count: F32 and F8_E4M3; largest difference 1, relative 0.5"});
}

/// Adds the header field DCP_VERSION, which PyTorch writes, to all shards in the folder `step`.
void make_shards_of_others(const std::filesystem::path& step) {
  for (const auto& entry : std::filesystem::directory_iterator(step)) {
    const std::string bytes = ReadFile(entry.path());
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    std::string header = bytes.substr(sizeof(length), length);
    header.insert(header.find("\"format\""), R"("DCP_VERSION":"1.0",)");
    WriteFile(entry.path(),
              testing::SafetensorsBytes(header, bytes.substr(sizeof(length) + length)));
  }
}

/// If a folder has no manifest, load() accepts shards from PyTorch but refuses Tessera's shards.
TEST(PyTorchShards, AreLoadedWithoutAManifest) {
  const TemporaryFolder dir;
  const auto step = dir / "step-00000001";
  const auto expect_refused = [&](const char* part, const char* advice) {
    EXPECT_ERROR(ExpectLoads(step, 5), part, advice);
  };
  SaveStep(dir.path(), 1, 5);
  std::filesystem::rename(step / "manifest.json", dir / "manifest.json");
  expect_refused("no manifest.json", "copy the whole folder");
  make_shards_of_others(step);
  EXPECT_EQ(ExpectLoads(step, 5), 0);
  EXPECT_ERROR(verify_step(step), "no checksums");
  WriteFile(step / "INCOMPLETE", "");
  expect_refused("there is no checkpoint in", "step-00000001");
  std::filesystem::remove(step / "INCOMPLETE");
  std::filesystem::remove(step / kFirstFile);
  expect_refused("are not complete: tensor '", "copy all");
}

namespace fs = std::filesystem;
using testing::Change;
using testing::Changes;
using testing::Disk;
using testing::Lost;
using testing::SystemCallFault;

constexpr const char* kManifestOf3 = "step-00000003/manifest.json";
const std::vector<std::string> kCalls = {"openat", "pwrite", "fsync", "fallocate", "rename",
                                         "unlink", "pread",  "close", "link"};

bool every_fault() {
  return std::getenv("TESSERA_EVERY_FAULT") != nullptr;
}

/// Saves on one rank, in this thread, because a process made by fork() has no other threads.
void save_alone(const fs::path& dir, std::int64_t step, int add, int keep = 0) {
  Rank rank(comm::thread_worlds(1)[0]);
  SavedState state(rank, {1, 1}, add);
  save(*rank.world(), dir, step, state.dict(), {.keep = keep});
}

/// Saves step 3 and keeps the newest 2 steps, so that the save removes step 1.
void save_third(const fs::path& dir) {
  save_alone(dir, 3, 3, 2);
}

void save_two(const fs::path& dir) {
  save_alone(dir, 1, 1);
  save_alone(dir, 2, 2);
}

void expect_whole_steps(const fs::path& dir, const std::string& when) {
  const bool third = fs::exists(dir / kManifestOf3);
  EXPECT_EQ(ExpectLoads(dir, third ? 3 : 2), third ? 3 : 2) << when;
  EXPECT_TRUE(verify_step(find_step(dir)).empty()) << when;
  ExpectLoads(dir / "step-00000002", 2);
  if (!third) {
    ExpectLoads(dir / "step-00000001", 1);
  }
}

/// How a process that called save() ended. kOther: by an unexpected exception or signal.
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

/// Returns a fault for each system call of save_third() and each action, such as "pwrite:3:EIO".
std::vector<std::string> all_faults() {
  const TemporaryFolder dir;
  save_two(dir.path());
  std::vector<std::string> faults;
  const SystemCallFault counted(dir.path(), "");
  save_third(dir.path());
  for (const std::string& call : kCalls) {
    std::vector<std::string> actions{"kill", "ENOSPC", "EIO", "EINTR", "EDQUOT"};
    if (call == "pwrite" || call == "pread") {
      actions.insert(actions.end(), {"short", "zero"});
    }
    for (int k = 1; k <= SystemCallFault::calls(call); ++k) {
      for (const std::string& action : actions) {
        faults.push_back(call + ":" + std::to_string(k) + ":" + action);
      }
    }
  }
  return faults;
}

std::vector<std::size_t> spread(std::size_t count, std::size_t size) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < count; ++i) {
    indices.push_back(i * size / count);
  }
  return indices;
}

TEST(InterruptedSave, LeavesCompleteStepsAfterAnySystemCallFails) {
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
    save_alone(dir.path(), third ? 4 : 3, 5);
    ExpectLoads(dir.path(), 5);
  }
  std::printf("%zu of %zu faults\n", count, faults.size());
}

/// Simulates a power failure after each system call. A power failure loses data that were not
/// synced, whereas killing a process loses no data.
TEST(InterruptedSave, LeavesCompleteStepsAfterAPowerFailure) {
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
      continue;  // without fsync(), the simulated disk loses every write
    }
    for (const Lost lost : {Lost::kAll, Lost::kBytes}) {
      disk.write_after_power_cut(out, lost);
      expect_whole_steps(out, std::to_string(&change - list.data()) + ": " + change.path);
      committed += fs::exists(out / kManifestOf3) ? 1 : 0;
    }
  }
  // save_third() has returned, so step 3 must exist.
  EXPECT_EQ(ExpectLoads(out, 3), 3);
  EXPECT_GT(committed, 10);
  EXPECT_GT(list.size(), 30U);
}

TEST(InterruptedSave, FailsOnAllRanksIfOneRankFails) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  int failures = 0;
  for (const char* name : {"/step-00000002/.shard-00003", "/step-00000002/shard-00003",
                           "/step-00000002/.INCOMPLETE", "/step-00000002/.manifest"}) {
    for (const char* fault : {"openat:1:EDQUOT", "pwrite:1:EIO", "fsync:1:EIO", "rename:1:EIO"}) {
      const SystemCallFault planted(dir.path().string() + name, fault);
      const auto errors = ErrorsOfRanks(4, [&](Rank& rank) {
        SavedState state(rank, {2, 2}, 5);
        ExpectUnchangedByError(
            state, [&] { save(*rank.world(), dir.path(), 2, state.dict(), {.run_id = "this"}); });
      });
      failures += errors.front().empty() ? 0 : 1;
      for (const std::string& error : errors) {
        EXPECT_EQ(error, errors.front()) << name << " " << fault;
      }
      // If save() never makes the system call that is to fail, save() succeeds and writes step 2.
      std::filesystem::remove_all(dir / "step-00000002");
      EXPECT_EQ(ExpectLoads(dir.path(), 1), 1) << name << " " << fault;
    }
  }
  EXPECT_EQ(failures, 10);
}

constexpr const char* kDirVariable = "TESSERA_TEST_DIR";

/// The test FailsOnAllRanksIfOneRankIsKilled runs this test in four processes.
TEST(InterruptedSave, DISABLED_SaveAsOneOfFour) {
  const comm::WorldScope scope(comm::world_from_environment({.timeout = std::chrono::seconds(20)}));
  Rank rank(scope.world());
  SavedState state(rank, {2, 2}, 5);
  save(*rank.world(), std::getenv(kDirVariable), 2, state.dict());
}

TEST(InterruptedSave, FailsOnAllRanksIfOneRankIsKilled) {
  std::vector<std::pair<std::string, std::string>> phases = {
      {"3", "pwrite:2:kill"},   // rank 3 is killed while it writes shards
      {"0", "rename:3:kill"}};  // rank 0 is killed while it renames the manifest
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
