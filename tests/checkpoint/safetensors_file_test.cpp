#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format.h"
#include "safetensors_bytes.h"
#include "tessera/checkpoint/safetensors.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using Sizes = std::vector<std::int64_t>;
using testing::Entry;
using testing::SafetensorsBytes;
using testing::TemporaryFolder;
using testing::WriteFile;

/// The bytes of a contiguous tensor.
std::string BytesOf(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

/// A file with one F32 tensor "w" holding 0, 1, 2, ... in `sizes`.
std::string Range(const Sizes& sizes) {
  const auto values = at::arange(c10::multiply_integers(sizes), at::kFloat);
  std::string shape;
  for (const auto size : sizes) {
    shape += (shape.empty() ? "" : ",") + std::to_string(size);
  }
  return SafetensorsBytes(
      "{" + Entry("\"F32\"", "[" + shape + "]", "[0," + std::to_string(values.nbytes()) + "]") +
          "}",
      BytesOf(values));
}

TEST(SafetensorsFile, ReadsEveryTypeBitByBit) {
  TemporaryFolder folder;
  const std::vector<std::pair<std::string, at::ScalarType>> types = {
      {"BOOL", at::kBool},          {"U8", at::kByte},    {"I8", at::kChar},
      {"I16", at::kShort},          {"U16", at::kUInt16}, {"F16", at::kHalf},
      {"BF16", at::kBFloat16},      {"I32", at::kInt},    {"U32", at::kUInt32},
      {"F32", at::kFloat},          {"F64", at::kDouble}, {"C64", at::kComplexFloat},
      {"I64", at::kLong},           {"U64", at::kUInt64}, {"F8_E4M3", at::kFloat8_e4m3fn},
      {"F8_E5M2", at::kFloat8_e5m2}};
  for (const auto& [name, type] : types) {
    const auto values = at::tensor({1, 0, 1, 1}).to(type);
    const auto offsets = "[0," + std::to_string(values.nbytes()) + "]";
    WriteFile(
        folder / "m",
        SafetensorsBytes("{" + Entry("\"" + name + "\"", "[2,2]", offsets) + "}", BytesOf(values)));
    const auto read = SafetensorsFile(folder / "m").read("w");
    EXPECT_EQ(read.scalar_type(), type);
    EXPECT_EQ(read.sizes(), (Sizes{2, 2}));
    EXPECT_EQ(BytesOf(read), BytesOf(values)) << name;
  }
}

TEST(SafetensorsFile, ReadsScalarsAndEmptyTensors) {
  TemporaryFolder folder;
  const auto value = at::full({}, 3.5, at::kFloat);
  WriteFile(folder / "m", SafetensorsBytes("{" + Entry("\"F32\"", "[0,5]", "[4,4]", "end") + "," +
                                               Entry("\"F32\"", "[]", "[0,4]", "scalar") + "," +
                                               Entry("\"F32\"", "[3,0]", "[0,0]", "begin") + "}",
                                           BytesOf(value)));
  const SafetensorsFile file(folder / "m");
  EXPECT_EQ(file.read("scalar").item<float>(), 3.5f);
  EXPECT_EQ(file.read("begin").sizes(), (Sizes{3, 0}));
  EXPECT_EQ(file.read("end").sizes(), (Sizes{0, 5}));
}

TEST(SafetensorsFile, ReadsAFileWithoutTensors) {
  TemporaryFolder folder;
  WriteFile(folder / "m", SafetensorsBytes("{}"));
  EXPECT_TRUE(SafetensorsFile(folder / "m").tensors().empty());
}

TEST(SafetensorsFile, ReadsDataThatAreNotAligned) {
  TemporaryFolder folder;
  const auto values = at::arange(3, at::kDouble);
  for (int spaces = 0; spaces < 8; ++spaces) {
    const std::string header = "{" + Entry("\"F64\"", "[3]", "[0,24]") + "}";
    WriteFile(folder / "m", SafetensorsBytes(header + std::string(spaces, ' '), BytesOf(values)));
    EXPECT_TRUE(at::equal(SafetensorsFile(folder / "m").read("w"), values));
  }
}

TEST(SafetensorsFile, GivesMetadata) {
  TemporaryFolder folder;
  WriteFile(folder / "m", SafetensorsBytes(R"({"__metadata__":{"format":"pt","a":"\u00e9"}})"));
  const SafetensorsFile file(folder / "m");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().at("a"), "\xc3\xa9");
  WriteFile(folder / "none", SafetensorsBytes(R"({"__metadata__":null})"));
  EXPECT_TRUE(SafetensorsFile(folder / "none").metadata().empty());
}

TEST(SafetensorsFile, ReadsEveryBlock) {
  TemporaryFolder folder;
  const Sizes sizes{3, 4, 5};
  WriteFile(folder / "m", Range(sizes));
  const SafetensorsFile file(folder / "m");
  const auto whole = at::arange(60, at::kFloat).view(sizes);
  for (std::int64_t code = 0; code < 4 * 4 * 5 * 5 * 6 * 6; ++code) {
    auto rest = code;
    Sizes begin(3), block(3);
    for (std::size_t dim = 0; dim < 3; ++dim) {
      const auto positions = sizes[dim] + 1;
      begin[dim] = rest % positions;
      block[dim] = rest / positions % positions - begin[dim];
      rest /= positions * positions;
    }
    if (std::any_of(block.begin(), block.end(), [](auto size) { return size < 0; })) {
      continue;
    }
    auto expected = whole;
    for (std::int64_t dim = 0; dim < 3; ++dim) {
      expected = expected.narrow(dim, begin[dim], block[dim]);
    }
    ASSERT_TRUE(at::equal(file.read("w", begin, block), expected));
  }
}

/// The CRC-32C of each MiB of a file's bytes.
std::vector<std::uint32_t> SumsOf(const std::string& bytes) {
  GranuleSums sums;
  sums.add(0, std::as_bytes(std::span(bytes)));
  return sums.sums();
}

/// Blocks that begin, end or lie within a MiB that others have a part of, in any order and again.
TEST(SafetensorsFile, ComparesPartsOfAMibWithItsChecksum) {
  TemporaryFolder folder;
  const std::string bytes = Range({700001});
  WriteFile(folder / "m", bytes);
  const auto whole = at::arange(700001, at::kFloat);
  const SafetensorsFile file(folder / "m", Symlinks::kFollow, SumsOf(bytes));
  for (const auto& [begin, count] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 10},
                                                          {10, 20},
                                                          {5, 10},
                                                          {5, 10},
                                                          {100, 300000},
                                                          {300100, 5},
                                                          {300000, 100000},
                                                          {299000, 2000},
                                                          {0, 700001},
                                                          {524000, 176001},
                                                          {700000, 1},
                                                          {0, 0},
                                                          {262144, 262144}}) {
    EXPECT_TRUE(
        at::equal(file.read("w", Sizes{begin}, Sizes{count}), whole.narrow(0, begin, count)))
        << begin << ", " << count;
  }
}

TEST(SafetensorsFile, RefusesAPartOfAMibOfWhichAByteIsDamaged) {
  TemporaryFolder folder;
  const std::string bytes = Range({600000});
  const auto sums = SumsOf(bytes);
  // In the second MiB: before the part that is read, within it and behind it.
  for (const std::size_t damaged : {1048576, 1202000, 2097151}) {
    std::string other = bytes;
    other[damaged] ^= 1;
    WriteFile(folder / "m", other);
    const SafetensorsFile file(folder / "m", Symlinks::kFollow, sums);
    EXPECT_ERROR(file.read("w", Sizes{300000}, Sizes{1000}), "bytes 1048576 to 2097151 of");
    EXPECT_ERROR(file.read("w", Sizes{300000}, Sizes{1000}), "bytes 1048576 to 2097151 of");
  }
}

/// Gaps of 64 KiB are 16384 of these values.
TEST(SafetensorsFile, ReadsRunsThatAreNearAndFar) {
  TemporaryFolder folder;
  WriteFile(folder / "m", Range({7, 30000}));
  const auto whole = at::arange(210000, at::kFloat).view({7, 30000});
  const SafetensorsFile file(folder / "m");
  for (const std::int64_t count : {1, 1000, 13615, 13616, 13617, 29999}) {
    EXPECT_TRUE(at::equal(file.read("w", Sizes{1, 1}, Sizes{5, count}),
                          whole.narrow(0, 1, 5).narrow(1, 1, count)));
  }
}

TEST(SafetensorsFile, ReadsMoreThanASpanOfNeighbouringRuns) {
  TemporaryFolder folder;
  WriteFile(folder / "m", Range({3000, 300}));
  const auto whole = at::arange(900000, at::kFloat).view({3000, 300});
  EXPECT_TRUE(at::equal(SafetensorsFile(folder / "m").read("w", Sizes{1, 7}, Sizes{2999, 150}),
                        whole.narrow(0, 1, 2999).narrow(1, 7, 150)));
}

/// Bytes that this thread has read so far.
std::int64_t BytesRead() {
  std::ifstream in("/proc/thread-self/io");
  std::string key;
  std::int64_t bytes = 0;
  in >> key >> bytes;
  EXPECT_EQ(key, "rchar:");
  return bytes;
}

TEST(SafetensorsFile, FillsBlocksOfAnyTypeAndStrides) {
  TemporaryFolder folder;
  WriteFile(folder / "m", Range({4, 6}));
  const SafetensorsFile file(folder / "m");
  const auto expected = at::arange(24, at::kFloat).view({4, 6}).slice(0, 1, 3).slice(1, 2, 5);
  const auto same = at::zeros({2, 3});
  const auto version = same._version();
  const auto columns = at::zeros({3, 2}).t();
  const auto other_type = at::zeros({2, 3}, at::kDouble);
  for (const auto& block : {same, columns, other_type}) {
    file.read_into("w", Sizes{1, 2}, block);
    EXPECT_TRUE(block.to(at::kFloat).equal(expected)) << block;
  }
  EXPECT_GT(same._version(), version);  // autograd hears of it
  EXPECT_ERROR(file.read_into("w", Sizes{3, 0}, same),
               "positions [3, 3 + 2) are outside of dimension 0, which has 4");
}

TEST(SafetensorsFile, LeavesABlockAloneThatIsGivenABadBool) {
  TemporaryFolder folder;
  WriteFile(folder / "m",
            SafetensorsBytes("{" + Entry("\"BOOL\"", "[2]", "[0,2]") + "}", {'\0', '\2'}));
  const auto block = at::ones({2}, at::kBool);
  EXPECT_ERROR(SafetensorsFile(folder / "m").read_into("w", Sizes{0}, block), "neither 0 nor 1");
  EXPECT_TRUE(block.all().item<bool>());
}

TEST(SafetensorsFile, ReadsTheBytesOfABlockOnly) {
  TemporaryFolder folder;
  WriteFile(folder / "m", Range({16, 1 << 16}));
  const SafetensorsFile file(folder / "m");
  constexpr std::int64_t kOwnReads = 1024;  // of /proc/thread-self/io itself
  const auto before = BytesRead();
  file.read("w", Sizes{4, 0}, Sizes{4, 1 << 16});
  const auto between = BytesRead();
  EXPECT_NEAR(between - before, 4 * (1 << 16) * 4, kOwnReads);
  file.read("w", Sizes{0, 1 << 14}, Sizes{16, 1 << 14});
  EXPECT_NEAR(BytesRead() - between, 16 * (1 << 14) * 4, kOwnReads);
}

}  // namespace
}  // namespace tessera::checkpoint
