// Tests the bytes of SafetensorsWriter, the values of SafetensorsFile, and the errors of both.

#include <ATen/ATen.h>

#include "checkpoint/format.h"
#include "safetensors_bytes.h"
#include "tessera/checkpoint/safetensors.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using Items = std::vector<SafetensorsWriter::Item>;
using Names = std::vector<std::string>;
using Sizes = std::vector<std::int64_t>;
using testing::Entry;
using testing::ReadFile;
using testing::SafetensorsBytes;
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
  // safetensors.numpy.save with metadata {"format": "pt"} writes these bytes.
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
  const auto whole = at::arange(35, at::kFloat).view({5, 7});
  SafetensorsWriter writer(folder / "m", {{"strided", at::kFloat, {4, 3}},
                                          {"blocks", at::kFloat, {5, 7}},
                                          {"scalar", at::kLong, {}},
                                          {"empty", at::kBFloat16, {0, 4}}});
  for (const std::int64_t row : {0, 2}) {
    for (const std::int64_t column : {3, 0}) {
      const std::int64_t rows = row == 0 ? 2 : 3, columns = column == 0 ? 3 : 4;
      writer.write("blocks", Sizes{row, column},
                   whole.narrow(0, row, rows).narrow(1, column, columns));
    }
  }
  writer.write("empty", at::empty({0, 4}, at::kBFloat16));
  writer.write("strided", strided);
  writer.write("scalar", scalar);
  writer.finish();
  const SafetensorsFile file(folder / "m");
  EXPECT_TRUE(at::equal(file.read("strided"), strided));
  EXPECT_TRUE(at::equal(file.read("blocks"), whole));
  EXPECT_TRUE(at::equal(file.read("scalar"), scalar));
  EXPECT_EQ(file.read("empty").sizes(), (Sizes{0, 4}));
}

TEST(SafetensorsWriter, ReplacesTheOldFileOnPublish) {
  TemporaryFolder folder;
  WriteFile(folder / "m", "old");
  SafetensorsWriter writer(folder / "m", kOneItem);
  writer.write("w", kOnes);
  writer.seal();
  EXPECT_EQ(ReadFile(folder / "m"), "old");
  writer.publish();
  EXPECT_TRUE(at::equal(SafetensorsFile(folder / "m").read("w"), kOnes));
  EXPECT_EQ(folder.files(), Names{"m"});
  { SafetensorsWriter(folder / "unfinished", kOneItem).write("w", kOnes); }
  EXPECT_EQ(folder.files(), Names{"m"});
}

TEST(SafetensorsWriter, RefusesUnannouncedTensors) {
  TemporaryFolder folder;
  SafetensorsWriter writer(folder / "m", kOneItem), partial(folder / "m", kOneItem);
  partial.write("w", Sizes{0, 0}, kOnes.narrow(1, 0, 2));
  testing::expect_refusals(
      {{"unwritten", [&] { partial.finish(); }, {"8 bytes", "'w'"}},
       {"name", [&] { writer.write("v", kOnes); }, {"'v' is not in the items"}},
       {"sizes", [&] { writer.write("w", kOnes.t()); }, {"[3, 2]", "[2, 3]"}},
       {"type", [&] { writer.write("w", kOnes.to(at::kHalf)); }, {"Half"}},
       {"place", [&] { writer.write("w", Sizes{1, 0}, kOnes); }, {"dimension 0"}},
       {"twice",
        [&] {
          writer.write("w", kOnes);
          writer.write("w", kOnes);
        },
        {"written twice"}}});
  EXPECT_FALSE(std::filesystem::exists(folder / "m"));
}

TEST(SafetensorsWriter, ConstructorRefusesInvalidItemsAndUnwritableFiles) {
  TemporaryFolder folder;
  const auto making = [&](const Items& items, const char* name = "m") {
    return [&folder, items, name] { SafetensorsWriter(folder / name, items); };
  };
  testing::expect_refusals(
      {{"twice",
        making({{"w", at::kFloat, {1}}, {"w", at::kFloat, {1}}}),
        {"two tensors are named 'w'"}},
       {"path", making({{"a/b", at::kFloat, {1}}}), {"looks like a path"}},
       {"reserved name", making({{"__metadata__", at::kFloat, {1}}}), {"rename the tensor"}},
       {"not UTF-8", making({{"\xff", at::kFloat, {1}}}), {"not valid UTF-8"}},
       {"type", making({{"w", at::kComplexDouble, {1}}}), {"safetensors lacks"}},
       {"folder", making(kOneItem, "missing/m"), {"No such file"}},
       {"disk", making({{"w", at::kByte, {std::int64_t{1} << 55}}}), {"cannot reserve room"}}});
  EXPECT_TRUE(folder.files().empty());
}

class SafetensorsFileRefuses : public ::testing::Test {
 protected:
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

  /// Pairs of an invalid file, header or name, and a text that the error message must contain.
  using Rows = std::vector<std::pair<std::string, std::string>>;

  TemporaryFolder folder_;
};

TEST_F(SafetensorsFileRefuses, MalformedFiles) {
  for (const auto& [bytes, part] :
       Rows{{"", "only 0 bytes"},
            {"1234567", "only 7 bytes"},
            {SafetensorsBytes(""), "does not begin with '{'"},
            {SafetensorsBytes("{"), "bad JSON"},
            {SafetensorsBytes(" {}"), "does not begin with '{'"},
            {SafetensorsBytes("\xef\xbb\xbf{}"), "byte order mark"},
            {SafetensorsBytes("{}", "", 100'000'001), "the limit is 100000000"},
            {std::string(8, '\xff') + "{}", "18446744073709551615"},
            {std::string("\xf8") + std::string(7, '\xff') + "{}", "the limit is 100000000"},
            {SafetensorsBytes("{}", "", 3), "is truncated"}}) {
    Refuses(bytes, part);
  }
}

TEST_F(SafetensorsFileRefuses, MalformedHeaders) {
  const std::string good = Entry("\"U8\"", "[16]", "[0,16]");
  Rows rows{
      {"{\"a\":}", "bad JSON"},
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
  for (const auto& [header, part] : rows) {
    RefusesHeader(header, part);
  }
}

TEST_F(SafetensorsFileRefuses, InvalidHeaderEntries) {
  struct Row {
    std::string dtype, shape, offsets, part;
  };
  std::vector<Row> rows{{"\"F4\"", "[4]", "[0,16]", "dtype \"F4\" is unknown"},
                        {"32", "[4]", "[0,16]", "not a string"},
                        {"\"U8\"", "16", "[0,16]", "not a list"},
                        {"\"U8\"", "[-16]", "[0,16]", "not an integer of at least 0"},
                        {"\"U8\"", "[9223372036854775808]", "[0,16]", "too large"},
                        {"\"U8\"", "[4611686018427387904,4]", "[0,16]", "elements overflows"},
                        {"\"U8\"", "[4294967296,4294967296,0]", "[0,0]", "elements overflows"},
                        {"\"F64\"", "[4611686018427387904]", "[0,16]", "bytes overflows"},
                        {"\"U8\"", "[16]", "[0]", "not two numbers"},
                        {"\"U8\"", "[16]", "[0,16.0]", "not an integer of at least 0"},
                        {"\"U8\"", "[16]", "[16,0]", "before they begin"},
                        {"\"F32\"", "[16]", "[0,16]", "its shape and dtype need 64"},
                        {"\"U8\"", "[8]", "[8,16]", "begin at 8, but the data"},
                        {"\"U8\"", "[17]", "[0,17]", "only 16 bytes of data"},
                        {"\"U8\"", "[15]", "[0,15]", "end at 15, but the file has 16"}};
  for (const std::string bad : {"-1", "-0", "16.0", "1e3", "\"16\"", "null", "true", "[16]"}) {
    rows.push_back({"\"U8\"", "[" + bad + "]", "[0,16]", ""});
  }
  for (const Row& row : rows) {
    RefusesEntry(row.dtype, row.shape, row.offsets, row.part);
  }
}

TEST_F(SafetensorsFileRefuses, TruncatedFiles) {
  const std::string whole =
      SafetensorsBytes("{" + Entry("\"F32\"", "[4]", "[0,16]") + "}", std::string(16, 'x'));
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    Refuses(whole.substr(0, bytes), "is truncated");
  }
  WriteFile(folder_ / "m", whole);
  const SafetensorsFile file(folder_ / "m");
  std::filesystem::resize_file(folder_ / "m", whole.size() - 1);
  EXPECT_ERROR(file.read("w"), "became shorter");
}

TEST_F(SafetensorsFileRefuses, TooManyEntriesValuesOrDimensions) {
  std::string header = "{";
  for (int i = 0; i < 1'000'001; ++i) {
    header.append("\"").append(std::to_string(i)).append("\":1,");
  }
  header.back() = '}';
  RefusesHeader(header, "more than 1000000 keys");
  const auto repeated = [](const char* text, int times) {
    std::string all;
    for (int i = 0; i < times; ++i) {
      all += text;
    }
    return all;
  };
  RefusesHeader(
      R"({"w":{"dtype":"U8","data_offsets":[0,1],"shape":[0)" + repeated(",0", 4'000'000) + "]}}",
      "more than 4000000 values");
  RefusesHeader(R"({"a":[[])" + repeated(",[]", 4'000'000) + "]}", "more than 4000000 values");
  RefusesHeader(repeated("{\"w\":", 100'000), "nested deeper");
  RefusesEntry("\"U8\"", "[16" + repeated(",1", 64) + "]", "[0,16]", "65 dimensions");
}

TEST_F(SafetensorsFileRefuses, DevicesMissingFilesAndLinks) {
  EXPECT_ERROR(SafetensorsFile("/dev/zero"), "not a regular file");
  EXPECT_ERROR(SafetensorsFile(folder_ / "missing"), "No such file");
  WriteFile(folder_ / "real", SafetensorsBytes("{}"));
  std::filesystem::create_symlink(folder_ / "real", folder_ / "link");
  EXPECT_ERROR(SafetensorsFile(folder_ / "link", Symlinks::kRefuse), "symbolic link");
  EXPECT_TRUE(SafetensorsFile(folder_ / "link").tensors().empty());
}

TEST_F(SafetensorsFileRefuses, InvalidTensorNames) {
  Rows rows = {{"", "name is empty"}, {std::string(1'000'000, 'w'), "1000000 bytes"}};
  for (const char* path : {"a/b", "..", "../w", "a\\\\b", "/etc/passwd"}) {
    rows.emplace_back(path, "looks like a path");
  }
  for (const char* control : {"\\u0000", "\\n", "\x7f", "\xc2\x80", "\xc2\x9f", "\xe2\x80\xaa",
                              "\xe2\x80\xae", "\xe2\x81\xa6", "\xe2\x81\xa9"}) {
    rows.emplace_back(std::string("w") + control, "control character");
  }
  for (const auto& [name, part] : rows) {
    RefusesHeader("{" + Entry("\"U8\"", "[16]", "[0,16]", name) + "}", part);
  }
  for (const char* each : {"\xc2\xa0", "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\xaa"}) {
    WriteFile(folder_ / "m",
              SafetensorsBytes("{" + Entry("\"U8\"", "[1]", "[0,1]", each) + "}", "x"));
    EXPECT_EQ(SafetensorsFile(folder_ / "m").tensors().size(), 1U);
  }
}

TEST_F(SafetensorsFileRefuses, InvalidBoolsAndOutOfRangeBlocks) {
  const auto file_of = [&](const std::string& entry, const std::string& data) {
    WriteFile(folder_ / "m", SafetensorsBytes("{" + entry + "}", data));
    return SafetensorsFile(folder_ / "m");
  };
  const auto bools = file_of(Entry("\"BOOL\"", "[2]", "[0,2]"), {'\0', '\2'});
  const auto block = at::ones({2}, at::kBool);
  EXPECT_ERROR(bools.read("w"), "neither 0 nor 1");
  EXPECT_ERROR(bools.read_into("w", Sizes{0}, block), "neither 0 nor 1");
  EXPECT_TRUE(block.all().item<bool>());
  const auto file = file_of(Entry("\"U8\"", "[4,4]", "[0,16]"), std::string(16, 'x'));
  testing::expect_refusals(
      {{"columns", [&] { file.read("w", Sizes{0, 1}, Sizes{4, 4}); }, {"dimension 1"}},
       {"negative", [&] { file.read("w", Sizes{-1, 0}, Sizes{1, 1}); }, {"dimension 0"}},
       {"dimensions", [&] { file.read("w", Sizes{0}, Sizes{16}); }, {"1 dimensions"}},
       {"large", [&] { file.read("w", Sizes{INT64_MAX, 0}, Sizes{1, 1}); }, {"dimension 0"}},
       {"name", [&] { file.read("v"); }, {"no tensor 'v'"}}});
}

std::string BytesOf(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

/// Returns a safetensors file with an F32 tensor "w" of `sizes` and the values 0, 1, 2, ...
std::string RangeBytes(const Sizes& sizes) {
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

TEST(SafetensorsFile, ReadsScalarsEmptyTensorsAndEmptyFiles) {
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
  WriteFile(folder / "none", SafetensorsBytes(R"({"__metadata__":null})"));
  EXPECT_TRUE(SafetensorsFile(folder / "none").tensors().empty());
}

TEST(SafetensorsFile, ReadsEveryBlock) {
  TemporaryFolder folder;
  const Sizes sizes{3, 4, 5};
  WriteFile(folder / "m", RangeBytes(sizes));
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

std::vector<std::uint32_t> SumsOf(const std::string& bytes) {
  GranuleSums sums;
  sums.add(0, std::as_bytes(std::span(bytes)));
  return sums.sums();
}

TEST(SafetensorsFile, ReadsPartsOfChecksummedMibs) {
  TemporaryFolder folder;
  const std::string bytes = RangeBytes({700001});
  WriteFile(folder / "m", bytes);
  const auto whole = at::arange(700001, at::kFloat);
  const SafetensorsFile file(folder / "m", Symlinks::kFollow, SumsOf(bytes));
  constexpr std::int64_t kBlocks[][2] = {
      {0, 10},     {10, 20},         {5, 10},         {5, 10},     {100, 300000},
      {300100, 5}, {300000, 100000}, {299000, 2000},  {0, 700001}, {524000, 176001},
      {700000, 1}, {0, 0},           {262144, 262144}};
  for (const auto& [begin, count] : kBlocks) {
    EXPECT_TRUE(
        at::equal(file.read("w", Sizes{begin}, Sizes{count}), whole.narrow(0, begin, count)))
        << begin << ", " << count;
  }
}

TEST(SafetensorsFile, RefusesAnyReadOfADamagedMib) {
  TemporaryFolder folder;
  const std::string bytes = RangeBytes({600000});
  const auto sums = SumsOf(bytes);
  // Flips a byte in the second MiB of the file: before the block to read, in it, or after it.
  for (const std::size_t damaged : {1048576, 1202000, 2097151}) {
    std::string other = bytes;
    other[damaged] ^= 1;
    WriteFile(folder / "m", other);
    const SafetensorsFile file(folder / "m", Symlinks::kFollow, sums);
    for (int again = 0; again < 2; ++again) {
      EXPECT_ERROR(file.read("w", Sizes{300000}, Sizes{1000}), "bytes 1048576 to 2097151 of");
    }
  }
}

TEST(SafetensorsFile, ReadsRowsAcrossSmallAndLargeGaps) {
  TemporaryFolder folder;
  const auto expect_block = [&](const Sizes& sizes, const Sizes& begin, const Sizes& block) {
    WriteFile(folder / "m", RangeBytes(sizes));
    const auto whole = at::arange(c10::multiply_integers(sizes), at::kFloat).view(sizes);
    EXPECT_TRUE(at::equal(SafetensorsFile(folder / "m").read("w", begin, block),
                          whole.narrow(0, begin[0], block[0]).narrow(1, begin[1], block[1])));
  };
  // If gaps between the rows of a block are at most 64 KiB, one read gets several rows.
  for (const std::int64_t count : {1, 1000, 13615, 13616, 13617, 29999}) {
    expect_block({7, 30000}, {1, 1}, {5, count});
  }
  expect_block({3000, 300}, {1, 7}, {2999, 150});
}

std::int64_t BytesRead() {
  std::ifstream in("/proc/thread-self/io");
  std::string key;
  std::int64_t bytes = 0;
  in >> key >> bytes;
  EXPECT_EQ(key, "rchar:");
  return bytes;
}

TEST(SafetensorsFile, ReadsIntoTensorsOfAnyTypeAndStrides) {
  TemporaryFolder folder;
  WriteFile(folder / "m", RangeBytes({4, 6}));
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
  EXPECT_GT(same._version(), version);
  EXPECT_ERROR(file.read_into("w", Sizes{3, 0}, same),
               "positions [3, 3 + 2) of dimension 0, but the size of the dimension is 4");
}

TEST(SafetensorsFile, ReadsOnlyTheBytesOfTheBlock) {
  TemporaryFolder folder;
  WriteFile(folder / "m", RangeBytes({16, 1 << 16}));
  const SafetensorsFile file(folder / "m");
  constexpr std::int64_t kOwnReads = 1024;  // BytesRead() itself reads at most this many bytes
  const auto before = BytesRead();
  file.read("w", Sizes{4, 0}, Sizes{4, 1 << 16});
  const auto between = BytesRead();
  EXPECT_NEAR(between - before, 4 * (1 << 16) * 4, kOwnReads);
  file.read("w", Sizes{0, 1 << 14}, Sizes{16, 1 << 14});
  EXPECT_NEAR(BytesRead() - between, 16 * (1 << 14) * 4, kOwnReads);
}

}  // namespace
}  // namespace tessera::checkpoint
