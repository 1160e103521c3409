// Writes safetensors files, and refuses invalid ones.

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
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

using testing::Entry;
using testing::SafetensorsBytes;
using testing::TemporaryFolder;
using testing::WriteFile;

class SafetensorsReject : public ::testing::Test {
 protected:
  /// Writes `bytes` and expects that opening them fails with a message that holds `part`.
  void Refuses(const std::string& bytes, const std::string& part) {
    WriteFile(folder_ / "m.safetensors", bytes);
    EXPECT_ERROR(SafetensorsFile(folder_ / "m.safetensors"), part);
  }
  void RefusesHeader(const std::string& header, const std::string& part) {
    Refuses(SafetensorsBytes(header, std::string(16, 'x')), part);
  }
  void RefusesEntry(const std::string& dtype, const std::string& shape, const std::string& offsets,
                    const std::string& part) {
    RefusesHeader("{" + Entry(dtype, shape, offsets) + "}", part);
  }

  TemporaryFolder folder_;
};

TEST_F(SafetensorsReject, FilesOfOtherForm) {
  struct Row {
    std::string bytes, part;
  };
  for (const Row& row : std::vector<Row>{
           {"", "only 0 bytes"},
           {"1234567", "only 7 bytes"},
           {SafetensorsBytes(""), "does not begin with '{'"},
           {SafetensorsBytes("{"), "bad JSON"},
           {SafetensorsBytes("[]"), "does not begin with '{'"},
           {SafetensorsBytes(" {}"), "does not begin with '{'"},
           {SafetensorsBytes("\xef\xbb\xbf{}"), "byte order mark"},
           {SafetensorsBytes("{}", "", 100'000'001), "more than 100000000"},
           {std::string(8, '\xff') + "{}", "18446744073709551615"},
           {std::string("\xf8") + std::string(7, '\xff') + "{}", "more than 100000000"},
           {SafetensorsBytes("{}", "", 3), "it is truncated"}}) {
    Refuses(row.bytes, row.part);
  }
}

TEST_F(SafetensorsReject, HeadersOfOtherForm) {
  const std::string good = Entry("\"U8\"", "[16]", "[0,16]");
  struct Row {
    std::string header, part;
  };
  std::vector<Row> rows{
      {"{\"a\":}", "bad JSON"},
      {"{} {}", "bad JSON"},
      {"{},", "bad JSON"},
      {"{'a':1}", "bad JSON"},
      {"{/**/}", "bad JSON"},
      {"{" + good + "}" + std::string(3, '\0'), "NUL byte"},
      {"{\"w\":" + std::string(1'000'000, '['), "nested deeper"},
      {"{" + good + "," + good + "}", "\"w\" appears twice"},
      {R"({"w":{"dtype":"U8","shape":[16],"shape":[16],"data_offsets":[0,16]}})",
       "\"shape\" appears twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", "appears twice"},
      {R"({"__metadata__":{"a":"1","a":"1"}})", "\"a\" appears twice"},
      {R"({"__metadata__":"pt"})", "not an object"},
      {R"({"__metadata__":{"step":1}})", "not a string"},
      {R"({"w":{"shape":[16],"data_offsets":[0,16]}})", "no dtype"},
      {R"({"w":{"dtype":"U8","data_offsets":[0,16]}})", "no shape"},
      {R"({"w":{"dtype":"U8","shape":[16]}})", "no data_offsets"},
      {R"({"w":3})", "not an object"},
      {R"({"w":{"dtype":"U8","shape":[16],"data_offsets":[0,16],"stride":[1]}})", "fields besides"},
      {"{" + Entry("\"U8\"", "[8]", "[0,8]", "a") + "," + Entry("\"U8\"", "[7]", "[9,16]", "b") +
           "}",
       "tensor 'b': its data begin at 9"},
      {"{" + Entry("\"U8\"", "[8]", "[0,8]", "a") + "," + Entry("\"U8\"", "[9]", "[7,16]", "b") +
           "}",
       "tensor 'b': its data begin at 7"},
      {"{" + Entry("\"U8\"", "[16]", "[0,16]", "a") + "," + Entry("\"U8\"", "[16]", "[0,16]", "b") +
           "}",
       "tensor 'b': its data begin at 0"},
      {"{}", "end at 0, but the file has 16"}};
  for (const std::string bad : {"\xc0\xaf", "\xed\xa0\x80", "\xe2\x82", "\xff"}) {
    rows.push_back({"{" + Entry("\"U8\"", "[16]", "[0,16]", "w" + bad) + "}", "bad JSON"});
  }
  for (const Row& row : rows) {
    RefusesHeader(row.header, row.part);
  }
  std::string objects;
  for (int i = 0; i < 100'000; ++i) {
    objects += "{\"w\":";
  }
  RefusesHeader(objects, "nested deeper");
}

TEST_F(SafetensorsReject, EntriesThatDoNotFit) {
  struct Row {
    std::string dtype, shape, offsets, part;
  };
  std::vector<Row> rows{{"\"F31\"", "[4]", "[0,16]", "dtype \"F31\" is unknown"},
                        {"\"f32\"", "[4]", "[0,16]", "dtype \"f32\" is unknown"},
                        {"32", "[4]", "[0,16]", "not a string"},
                        {"\"U8\"", "16", "[0,16]", "not a list"},
                        {"\"U8\"", "[-16]", "[0,16]", "not a natural number"},
                        {"\"U8\"", "[9223372036854775808]", "[0,16]", "too large"},
                        {"\"U8\"", "[18446744073709551616]", "[0,16]", "not a natural number"},
                        {"\"U8\"", "[4611686018427387904,4]", "[0,16]", "elements overflows"},
                        {"\"U8\"", "[4294967296,4294967296]", "[0,0]", "elements overflows"},
                        {"\"U8\"", "[4294967296,4294967296,0]", "[0,0]", "elements overflows"},
                        {"\"F64\"", "[4611686018427387904]", "[0,16]", "bytes overflows"},
                        {"\"U8\"", "[16]", "[0]", "not two numbers"},
                        {"\"U8\"", "[16]", "[0,16,16]", "not two numbers"},
                        {"\"U8\"", "[16]", "{}", "not two numbers"},
                        {"\"U8\"", "[16]", "[0,16.0]", "not a natural number"},
                        {"\"U8\"", "[16]", "[-16,0]", "not a natural number"},
                        {"\"U8\"", "[16]", "[16,0]", "before they begin"},
                        {"\"U8\"", "[15]", "[0,16]", "its shape and dtype need 15"},
                        {"\"F32\"", "[16]", "[0,16]", "its shape and dtype need 64"},
                        {"\"U8\"", "[8]", "[8,16]", "begin at 8, but those before it end at 0"},
                        {"\"U8\"", "[17]", "[0,17]", "only 16 bytes of data"},
                        {"\"U8\"", "[15]", "[0,15]", "end at 15, but the file has 16"},
                        {"\"F4\"", "[33]", "[0,16]", "not a whole number of bytes"},
                        {"\"F6_E2M3\"", "[21]", "[0,15]", "not a whole number of bytes"}};
  for (const std::string bad : {"-1", "-0", "16.0", "1e3", "\"16\"", "null", "true", "[16]"}) {
    rows.push_back({"\"U8\"", "[" + bad + "]", "[0,16]", ""});
  }
  for (const Row& row : rows) {
    RefusesEntry(row.dtype, row.shape, row.offsets, row.part);
  }
}

TEST_F(SafetensorsReject, TruncatedData) {
  const std::string whole =
      SafetensorsBytes("{" + Entry("\"F32\"", "[4]", "[0,16]") + "}", std::string(16, 'x'));
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    WriteFile(folder_ / "cut", whole.substr(0, bytes));
    EXPECT_ERROR(SafetensorsFile(folder_ / "cut"), "it is truncated");
  }
}

TEST_F(SafetensorsReject, MillionsOfEntries) {
  std::string header = "{";
  for (int i = 0; i < 1'000'001; ++i) {
    header.append("\"").append(std::to_string(i)).append("\":1,");
  }
  header.back() = '}';
  RefusesHeader(header, "more than 1000000 keys");
}

TEST_F(SafetensorsReject, ManyValuesInOneList) {
  std::string header = R"({"w":{"dtype":"U8","data_offsets":[0,1],"shape":[0)";
  for (int i = 0; i < 4'000'000; ++i) {
    header += ",0";
  }
  RefusesHeader(header + "]}}", "more than 4000000 values");
}

TEST_F(SafetensorsReject, ManyEmptyListsInOneList) {
  std::string header = R"({"a":[[])";
  for (int i = 0; i < 4'000'000; ++i) {
    header += ",[]";
  }
  RefusesHeader(header + "]}", "more than 4000000 values");
}

TEST_F(SafetensorsReject, ManyDimensions) {
  std::string shape = "[16";
  for (int i = 0; i < 64; ++i) {
    shape += ",1";
  }
  RefusesEntry("\"U8\"", shape + "]", "[0,16]", "65 dimensions");
}

TEST_F(SafetensorsReject, FileThatShrinksWhileOpen) {
  const std::string whole =
      SafetensorsBytes("{" + Entry("\"F32\"", "[4]", "[0,16]") + "}", std::string(16, 'x'));
  WriteFile(folder_ / "m", whole);
  const SafetensorsFile file(folder_ / "m");
  std::filesystem::resize_file(folder_ / "m", whole.size() - 1);
  EXPECT_ERROR(file.read("w"), "became shorter");
}

TEST_F(SafetensorsReject, FilesThatAreNotRegular) {
  EXPECT_ERROR(SafetensorsFile(folder_.path()), "not a regular file");
  ASSERT_EQ(mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_ERROR(SafetensorsFile(folder_ / "pipe"), "not a regular file");
  EXPECT_ERROR(SafetensorsFile("/dev/zero"), "not a regular file");
  EXPECT_ERROR(SafetensorsFile(folder_ / "missing"), "No such file");
}

TEST_F(SafetensorsReject, SymbolicLinkWhereRefused) {
  WriteFile(folder_ / "real", SafetensorsBytes("{}"));
  std::filesystem::create_symlink(folder_ / "real", folder_ / "link");
  EXPECT_ERROR(SafetensorsFile(folder_ / "link", Symlinks::kRefuse), "symbolic link");
  EXPECT_TRUE(SafetensorsFile(folder_ / "link").tensors().empty());
}

TEST_F(SafetensorsReject, NamesThatLookLikePaths) {
  for (const std::string name : {"a/b", "..", "../w", "a\\\\b", "/etc/passwd"}) {
    RefusesHeader(std::string("{") + Entry("\"U8\"", "[16]", "[0,16]", name) + "}",
                  "looks like a path");
  }
}

TEST_F(SafetensorsReject, NamesThatAreEmptyHugeOrHoldControlCharacters) {
  const auto refuses = [&](const std::string& name, const std::string& part) {
    RefusesHeader("{" + Entry("\"U8\"", "[16]", "[0,16]", name) + "}", part);
  };
  refuses("", "name is empty");
  refuses(std::string(1'000'000, 'w'), "more than 4096");
  refuses("w\\u0000", "control character");
  refuses("w\\n", "control character");
  for (const char* each : {"\x7f", "\xc2\x80", "\xc2\x9f", "\xe2\x80\xaa", "\xe2\x80\xae",
                           "\xe2\x81\xa6", "\xe2\x81\xa9"}) {
    refuses(std::string("w") + each, "control character");
  }
  for (const char* each : {"\xc2\xa0", "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\xaa"}) {
    WriteFile(folder_ / "m",
              SafetensorsBytes("{" + Entry("\"U8\"", "[1]", "[0,1]", each) + "}", "x"));
    EXPECT_EQ(SafetensorsFile(folder_ / "m").tensors().size(), 1U);
  }
}

TEST_F(SafetensorsReject, BoolsThatAreNeitherTrueNorFalse) {
  WriteFile(folder_ / "m", SafetensorsBytes("{" + Entry("\"BOOL\"", "[2]", "[0,2]") + "}", "\1\2"));
  EXPECT_ERROR(SafetensorsFile(folder_ / "m").read("w"), "neither 0 nor 1");
}

TEST_F(SafetensorsReject, TypesThatLibtorchLacks) {
  WriteFile(folder_ / "m", SafetensorsBytes("{" + Entry("\"F4\"", "[4]", "[0,2]") + "}", "ab"));
  const SafetensorsFile file(folder_ / "m");
  EXPECT_ERROR(file.read("w"), "F4, which libtorch lacks");
}

TEST_F(SafetensorsReject, BlocksOutsideTheTensor) {
  WriteFile(folder_ / "m",
            SafetensorsBytes("{" + Entry("\"U8\"", "[4,4]", "[0,16]") + "}", std::string(16, 'x')));
  const SafetensorsFile file(folder_ / "m");
  using Sizes = std::vector<std::int64_t>;
  EXPECT_ERROR(file.read("w", Sizes{0, 1}, Sizes{4, 4}), "dimension 1");
  EXPECT_ERROR(file.read("w", Sizes{-1, 0}, Sizes{1, 1}), "dimension 0");
  EXPECT_ERROR(file.read("w", Sizes{0}, Sizes{16}), "1 dimensions");
  EXPECT_ERROR(file.read("w", Sizes{INT64_MAX, 0}, Sizes{1, 1}), "dimension 0");
  EXPECT_ERROR(file.read("v"), "no tensor 'v'");
}

}  // namespace
}  // namespace tessera::checkpoint
