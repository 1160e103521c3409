#include "checkpoint/step_folder.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>

#include "checkpoint/manifest.h"
#include "checkpoint/save.h"
#include "checkpoint/stored_step.h"
#include "faults/system_calls.h"
#include "saved_state.h"
#include "testing/files.h"
#include "testing/memory/memory_scope.h"

namespace tessera::checkpoint {
namespace {

using testing::TemporaryFolder;

/// Fewer files may be open than the step has.
TEST(StoredStep, IsLoadedAFileAfterAnother) {
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

/// Saves a step with `values` as "weight". Returns its folder.
std::filesystem::path save_weight(const TemporaryFolder& dir, const at::Tensor& values) {
  RunRanks(1, [&](Rank& rank) {
    nn::Linear net(values.size(1), values.size(0), nn::LinearOptions{false});
    net.slot("weight")->set(values);
    save(*rank.world(), dir.path(), 1, {net});
  });
  return dir / "step-00000001";
}

class WeightOf : public ::testing::TestWithParam<std::vector<std::int64_t>> {};
/// The rows of the second are larger than a piece.
INSTANTIATE_TEST_SUITE_P(StoredStep, WeightOf,
                         ::testing::Values(std::vector<std::int64_t>{3072, 2048},
                                           std::vector<std::int64_t>{2, 3 * kMebibyte}));

TEST_P(WeightOf, IsReadByThreadsWithinABoundOfMemory) {
  const TemporaryFolder dir;
  const at::Tensor values = at::arange(6 * kMebibyte, at::kFloat).view(GetParam());
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
  std::string bytes = testing::ReadFile(path);
  bytes[bytes.size() / 2] ^= 1;
  testing::WriteFile(path, bytes);
  EXPECT_ERROR(read(), "tensor 'weight': bytes 12582912 to");
}

/// A half of the columns: each thread reads parts of many granules.
TEST(StoredStep, IsReadByItsThreadsAtOnce) {
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
  // Each call takes 0.2 s.
  EXPECT_GT(testing::SystemCallFault::calls("pread"), 20);
  EXPECT_LT(took, std::chrono::milliseconds(120) * testing::SystemCallFault::calls("pread"));
  EXPECT_TRUE(target.equal(values.narrow(1, 1024, 1024)));
}

TEST(StepFolder, IsWrittenWithinABoundOfMemory) {
  const TemporaryFolder dir;
  // Whose rows do not lie one after another, so that they are copied.
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

TEST(StepFolder, IsMadeByOneOfSeveralRunsThatBeginItAtOnce) {
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
    EXPECT_EQ(testing::ReadFile(dir / "step-00000007/INCOMPLETE"),
              "run " + std::to_string(std::ranges::find(errors, "") - errors.begin()));
  }
}

}  // namespace
}  // namespace tessera::checkpoint
