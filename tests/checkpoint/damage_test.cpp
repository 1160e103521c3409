// What is wrong with a step is found and named, whichever byte it is.

#include <atomic>
#include <filesystem>
#include <fstream>
#include <new>

#include "checkpoint/manifest.h"
#include "checkpoint/ranks.h"
#include "saved_state.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/read_error.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::ErrorsOfRanks;
using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

TEST(DamagedStep, EveryByteOfTheManifestCounts) {
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

TEST(DamagedStep, EveryByteOfAFileCounts) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const FileRecord file = read_manifest(dir / "step-00000001").files.front();
  const auto path = dir / "step-00000001" / file.name;
  const std::string bytes = ReadFile(path);
  std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&stream](std::size_t at, char byte) {
    stream.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
  };
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    put(i, static_cast<char>(bytes[i] ^ (1 << (i % 8))));
    ASSERT_TRUE(testing::Throws<Error>([&] { SafetensorsFile(path, Symlinks::kRefuse, file.sums); },
                                       {file.name, "are not those that were written"}))
        << i;
    put(i, bytes[i]);
  }
  SafetensorsFile(path, Symlinks::kRefuse, file.sums);
}

TEST(DamagedStep, IsFoundAndNamedByAThousandBytesOfData) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    nn::Linear net(512, 1024);
    for (const auto& [name, slot] : net.named_slots()) {
      slot->set(at::ones_like(slot->get()));
    }
    save(*rank.world(), dir.path(), 1, {net});
  });
  const auto step = dir / "step-00000001";
  const auto path = step / read_manifest(step).files.front().name;
  const std::string bytes = ReadFile(path);
  const TensorEntry bias = SafetensorsFile(path).entry("bias");
  std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&stream](std::size_t at, char byte) {
    stream.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
  };
  for (std::size_t i = 0; i < 1000; ++i) {
    const std::size_t at = bias.offset + i * (bytes.size() - bias.offset) / 1000;
    put(at, static_cast<char>(bytes[at] ^ (1 << (i % 8))));
    const auto faults = verify_step(step);
    ASSERT_EQ(faults.size(), 1U) << at;
    const std::string place = "bytes " + std::to_string(at >> 20 << 20) + " to ";
    const char* tensor = at < bias.offset + bias.bytes ? "'bias' from byte" : "'weight' from byte";
    ASSERT_TRUE(testing::Contains(faults[0], {place, path.string(), tensor})) << at;
    put(at, bytes[at]);
  }
}

TEST(DamagedStep, IsRefusedOnAllRanksBeforeAnythingChanges) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const auto path = dir / "step-00000001/shard-00002-model-00001-of-00002.safetensors";
  const std::string bytes = ReadFile(path);
  const auto errors = [&] {
    return ErrorsOfRanks(4, [&](Rank& rank) {
      SavedState state(rank, {4, 1}, 9);
      const SavedState before(rank, {4, 1}, 9);
      try {
        load(*rank.world(), dir.path(), state.dict());
      } catch (const Error&) {
        ExpectEqual(state.local(), before.local());
        EXPECT_TRUE(state.net.middle->slot("bias")->initialized());
        throw;
      }
    });
  };
  const auto expect = [&](const std::string& part) {
    const auto all = errors();
    for (const std::string& error : all) {
      EXPECT_CONTAINS(error, "shard-00002-model-00001", part);
      EXPECT_EQ(error, all.front());
    }
  };
  WriteFile(path, bytes.substr(0, bytes.size() - 1));
  expect("bytes, but the manifest says");
  std::filesystem::remove(path);
  expect("can't be looked at: No such file");
  std::string flipped = bytes;
  flipped[20] ^= 1;
  WriteFile(path, flipped);
  expect("are not those that were written");
}

/// Whether all ranks get a DamagedStep if the second of them throws `error` as it reads.
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
    } catch (const Error&) {  // so is this one on all
    }
  });
  EXPECT_TRUE(ranks == 0 || ranks == 2) << ranks;
  return ranks == 2;
}

TEST(DamagedStep, IsOneWithWrongContentNotOneThatCannotBeOpened) {
  const TemporaryFolder dir;
  WriteFile(dir / "there", "");
  EXPECT_TRUE(IsDamage(Error("other bytes")));
  EXPECT_TRUE(IsDamage(detail::ReadError("no such file", dir / "gone")));
  EXPECT_FALSE(IsDamage(detail::ReadError("no such file on this rank", dir / "there")));
  EXPECT_FALSE(IsDamage(detail::ReadError("too many open files")));
  EXPECT_FALSE(IsDamage(std::bad_alloc()));
  SaveStep(dir.path(), 1);
  const auto path = dir / "step-00000001/shard-00002-model-00001-of-00002.safetensors";
  std::filesystem::remove(path);
  std::filesystem::create_symlink(path, path);  // it can't be opened, and yet is there
  for (const std::string& error : ErrorsOfRanks(1, [&](Rank& rank) {
         SavedState state(rank, {1, 1});
         try {
           load(*rank.world(), dir.path(), state.dict());
         } catch (const checkpoint::DamagedStep&) {
           ADD_FAILURE() << "a file that can't be looked at is no damage";
           throw;
         }
       })) {
    EXPECT_CONTAINS(error, "shard-00002-model-00001", "can't be looked at");
  }
}

TEST(DamagedStep, LeavesNoModelHalfLoaded) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    nn::Linear net(1024, 1024);
    for (const auto& [name, slot] : net.named_slots()) {
      slot->set(at::ones_like(slot->get()));
    }
    save(*rank.world(), dir.path(), 1, {net});
    const auto path = dir / "step-00000001/shard-00000-model-00001-of-00001.safetensors";
    std::string bytes = ReadFile(path);
    bytes.back() ^= 1;
    WriteFile(path, bytes);
    EXPECT_ERROR(load(*rank.world(), dir.path(), {net}), "tensor 'weight': bytes 4194304 to",
                 "shard-00000-model-00001", "load another step");
    EXPECT_FALSE(net.slot("bias")->initialized());
  });
}

TEST(DamagedStep, IsPassedOverByAllRanksAndSavedAgain) {
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
  EXPECT_ERROR(withdraw_step(dir.path(), 2, "other"), "is damaged, but of another run");
  withdraw_step(dir.path(), 2, "run");
  EXPECT_EQ(ExpectLoads(dir.path(), 1), 1);
  SaveStep(dir.path(), 2, 3, options);
  EXPECT_EQ(ExpectLoads(dir.path(), 3), 2);
  ExpectLoads(dir / "step-00000001", 1);
}

TEST(DamagedStep, LeavesTheParametersWhenTheOptimizerAloneIsLoaded) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    nn::Linear net(1024, 1024, nn::LinearOptions{false});
    net.slot("weight")->set(at::ones({1024, 1024}));
    const StateDict state{net, {{"weight.exp_avg", at::ones({1024, 1024})}}};
    save(*rank.world(), dir.path(), 1, state);
    const char* name = "optimizer.state.weight.exp_avg";
    const Manifest manifest = read_manifest(dir / "step-00000001");
    const std::size_t file = manifest.tensors.at(name).chunks.front().file;
    const auto path = dir / "step-00000001" / manifest.files[file].name;
    const TensorEntry entry = SafetensorsFile(path).entry(name);
    std::string bytes = ReadFile(path);
    bytes[entry.offset + entry.bytes - 1] ^= 1;
    WriteFile(path, bytes);
    EXPECT_ERROR(load(*rank.world(), dir.path(), state, {.exclude = {"weight"}}),
                 "tensor 'optimizer.state.weight.exp_avg': bytes");
    EXPECT_TRUE(net.slot("weight")->initialized());
  });
}

}  // namespace
}  // namespace tessera::checkpoint
