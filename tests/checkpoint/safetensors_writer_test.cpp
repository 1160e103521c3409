#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "safetensors_bytes.h"
#include "tessera/checkpoint/safetensors.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using Items = std::vector<SafetensorsWriter::Item>;
using Names = std::vector<std::string>;
using Sizes = std::vector<std::int64_t>;
using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

const Items kOneItem{{"w", at::kFloat, {2, 3}}};
const at::Tensor kOnes = at::ones({2, 3});

TEST(SafetensorsWriter, WritesTheBytesOfTheReference) {
  TemporaryFolder folder;
  SafetensorsWriter writer(folder / "m",
                           {{"b", at::kByte, {1}}, {"z", at::kHalf, {2}}, {"a", at::kByte, {2}}});
  writer.write("a", at::tensor({1, 2}, at::kByte));
  writer.write("b", at::tensor({3}, at::kByte));
  writer.write("z", at::tensor({0.0, 1.0}).to(at::kHalf));
  writer.finish();
  // safetensors.numpy.save of the same tensors, with metadata {"format": "pt"}.
  std::string header = R"({"__metadata__":{"format":"pt"},)"
                       R"("z":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},)"
                       R"("a":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},)"
                       R"("b":{"dtype":"U8","shape":[1],"data_offsets":[6,7]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::string data("\0\0\0\x3c\1\2\3", 7);
  EXPECT_EQ(ReadFile(folder / "m"), testing::SafetensorsBytes(header, data));
}

TEST(SafetensorsWriter, RoundTrips) {
  TemporaryFolder folder;
  const auto strided = at::arange(12, at::kFloat).view({3, 4}).t();
  const auto scalar = at::full({}, 7, at::kLong);
  SafetensorsWriter writer(folder / "m", {{"strided", at::kFloat, {4, 3}},
                                          {"scalar", at::kLong, {}},
                                          {"empty", at::kBFloat16, {0, 4}}});
  writer.write("empty", at::empty({0, 4}, at::kBFloat16));
  writer.write("strided", strided);
  writer.write("scalar", scalar);
  writer.finish();
  const SafetensorsFile file(folder / "m");
  EXPECT_TRUE(at::equal(file.read("strided"), strided));
  EXPECT_TRUE(at::equal(file.read("scalar"), scalar));
  EXPECT_EQ(file.read("empty").sizes(), (Sizes{0, 4}));
}

TEST(SafetensorsWriter, AssemblesBlocks) {
  TemporaryFolder folder;
  const auto whole = at::arange(35, at::kFloat).view({5, 7});
  SafetensorsWriter writer(folder / "m", {{"w", at::kFloat, {5, 7}}});
  for (const std::int64_t row : {0, 2}) {
    for (const std::int64_t column : {3, 0}) {
      const std::int64_t rows = row == 0 ? 2 : 3, columns = column == 0 ? 3 : 4;
      writer.write("w", Sizes{row, column}, whole.narrow(0, row, rows).narrow(1, column, columns));
    }
  }
  writer.finish();
  EXPECT_TRUE(at::equal(SafetensorsFile(folder / "m").read("w"), whole));
}

TEST(SafetensorsWriter, ReplacesAnOlderFileAtTheEndOnly) {
  TemporaryFolder folder;
  WriteFile(folder / "m", "old");
  SafetensorsWriter writer(folder / "m", kOneItem);
  writer.write("w", kOnes);
  writer.seal();
  EXPECT_EQ(ReadFile(folder / "m"), "old");
  writer.publish();
  EXPECT_TRUE(at::equal(SafetensorsFile(folder / "m").read("w"), kOnes));
  EXPECT_EQ(folder.files(), Names{"m"});
}

TEST(SafetensorsWriter, LeavesNothingWithoutFinish) {
  TemporaryFolder folder;
  { SafetensorsWriter(folder / "m", kOneItem).write("w", kOnes); }
  EXPECT_TRUE(folder.files().empty());
}

TEST(SafetensorsWriter, RemovesWhatAKilledWriterLeft) {
  TemporaryFolder folder;
  const pid_t child = fork();
  if (child == 0) {
    SafetensorsWriter writer(folder / "m", kOneItem);
    raise(SIGKILL);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ASSERT_EQ(folder.files().size(), 1u);
  SafetensorsWriter writer(folder / "m", kOneItem);
  writer.write("w", kOnes);
  writer.finish();
  EXPECT_EQ(folder.files(), Names{"m"});
}

TEST(SafetensorsWriter, LeavesALiveWriterAlone) {
  TemporaryFolder folder;
  SafetensorsWriter first(folder / "m", kOneItem), second(folder / "m", kOneItem);
  first.write("w", kOnes);
  second.write("w", kOnes + 1);
  first.finish();
  second.finish();
  EXPECT_TRUE(at::equal(SafetensorsFile(folder / "m").read("w"), kOnes + 1));
}

TEST(SafetensorsWriter, RefusesToFinishUnwrittenTensors) {
  TemporaryFolder folder;
  SafetensorsWriter writer(folder / "m", kOneItem);
  writer.write("w", Sizes{0, 0}, kOnes.narrow(1, 0, 2));
  EXPECT_ERROR(writer.finish(), "8 bytes of tensor 'w' were not written");
  EXPECT_FALSE(std::filesystem::exists(folder / "m"));
}

TEST(SafetensorsWriter, RefusesATensorTwice) {
  TemporaryFolder folder;
  SafetensorsWriter writer(folder / "m", kOneItem);
  writer.write("w", kOnes);
  EXPECT_ERROR(writer.write("w", kOnes), "written twice");
}

TEST(SafetensorsWriter, RefusesWhatWasNotAnnounced) {
  TemporaryFolder folder;
  SafetensorsWriter writer(folder / "m", kOneItem);
  EXPECT_ERROR(writer.write("v", kOnes), "'v' was not announced");
  EXPECT_ERROR(writer.write("w", kOnes.t()), "has sizes [3, 2], announced were [2, 3]");
  EXPECT_ERROR(writer.write("w", kOnes.to(at::kHalf)), "has the type Half");
  EXPECT_ERROR(writer.write("w", Sizes{1, 0}, kOnes), "dimension 0");
}

TEST(SafetensorsWriter, RefusesUnfitItems) {
  TemporaryFolder folder;
  const auto refuses = [&](const Items& items, const std::string& part) {
    EXPECT_ERROR(SafetensorsWriter(folder / "m", items), part);
  };
  refuses({{"w", at::kFloat, {1}}, {"w", at::kFloat, {1}}}, "two tensors are named 'w'");
  refuses({{"a/b", at::kFloat, {1}}}, "looks like a path");
  refuses({{"__metadata__", at::kFloat, {1}}}, "is that of a file's own entry: rename the tensor");
  refuses({{"\xff", at::kFloat, {1}}}, "not valid UTF-8");
  refuses({{"w", at::kComplexDouble, {1}}}, "safetensors lacks");
  EXPECT_TRUE(folder.files().empty());
}

TEST(SafetensorsWriter, NamesAMissingFolder) {
  TemporaryFolder folder;
  EXPECT_ERROR(SafetensorsWriter(folder / "missing/m", kOneItem), "No such file");
}

TEST(SafetensorsWriter, NoticesAFullDiskAtTheStart) {
  TemporaryFolder folder;
  EXPECT_ERROR(SafetensorsWriter(folder / "m", {{"w", at::kByte, {std::int64_t{1} << 55}}}),
               "cannot reserve room");
  EXPECT_TRUE(folder.files().empty());
}

}  // namespace
}  // namespace tessera::checkpoint
