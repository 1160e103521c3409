// Everything a safe reader must refuse; reading goes wrong in one way in each file.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <vector>

#include "safetensors_bytes.h"
#include "tessera/checkpoint/safetensors.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

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

TEST_F(SafetensorsReject, FileShorterThanItsLengthField) {
  Refuses("", "only 0 bytes");
  Refuses("1234567", "only 7 bytes");
}

TEST_F(SafetensorsReject, HeaderThatIsNoObject) {
  Refuses(SafetensorsBytes(""), "does not begin with '{'");
  Refuses(SafetensorsBytes("{"), "bad JSON");
  Refuses(SafetensorsBytes("[]"), "does not begin with '{'");
  Refuses(SafetensorsBytes(" {}"), "does not begin with '{'");
  Refuses(SafetensorsBytes("\xef\xbb\xbf{}"), "JSON begins with a byte order mark: save it");
}

TEST_F(SafetensorsReject, HeaderBeyondTheLimit) {
  Refuses(SafetensorsBytes("{}", "", 100'000'001), "more than 100000000");
}

TEST_F(SafetensorsReject, HeaderLengthThatWrapsAround) {
  Refuses(std::string(8, '\xff') + "{}", "18446744073709551615");
  Refuses(std::string("\xf8") + std::string(7, '\xff') + "{}", "more than 100000000");
}

TEST_F(SafetensorsReject, HeaderLongerThanTheFile) {
  Refuses(SafetensorsBytes("{}", "", 3), "it is truncated");
}

TEST_F(SafetensorsReject, InvalidUtf8) {
  for (const std::string bad : {"\xc0\xaf", "\xed\xa0\x80", "\xe2\x82", "\xff"}) {
    RefusesHeader(std::string("{") + Entry("\"U8\"", "[16]", "[0,16]", "w" + bad) + "}",
                  "bad JSON");
  }
}

TEST_F(SafetensorsReject, BadJson) {
  RefusesHeader("{\"a\":}", "bad JSON");
  RefusesHeader("{} {}", "bad JSON");
  RefusesHeader("{},", "bad JSON");
  RefusesHeader("{'a':1}", "bad JSON");
  RefusesHeader("{/**/}", "bad JSON");
}

TEST_F(SafetensorsReject, PaddingWithNul) {
  const std::string header = "{" + Entry("\"U8\"", "[16]", "[0,16]") + "}";
  RefusesHeader(header + std::string(3, '\0'), "NUL byte");
}

TEST_F(SafetensorsReject, DeepNesting) {
  RefusesHeader("{\"w\":" + std::string(1'000'000, '['), "nested deeper");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) {
    objects += "{\"w\":";
  }
  RefusesHeader(objects, "nested deeper");
}

TEST_F(SafetensorsReject, DuplicateTensorName) {
  const std::string entry = Entry("\"U8\"", "[16]", "[0,16]");
  RefusesHeader("{" + entry + "," + entry + "}", "\"w\" appears twice");
}

TEST_F(SafetensorsReject, DuplicateField) {
  RefusesHeader(R"({"w":{"dtype":"U8","shape":[16],"shape":[16],"data_offsets":[0,16]}})",
                "\"shape\" appears twice");
}

TEST_F(SafetensorsReject, DuplicateMetadata) {
  RefusesHeader(R"({"__metadata__":{},"__metadata__":{}})", "appears twice");
  RefusesHeader(R"({"__metadata__":{"a":"1","a":"1"}})", "\"a\" appears twice");
}

TEST_F(SafetensorsReject, MetadataThatIsNoObject) {
  RefusesHeader(R"({"__metadata__":"pt"})", "not an object");
}

TEST_F(SafetensorsReject, MetadataThatIsNoString) {
  RefusesHeader(R"({"__metadata__":{"step":1}})", "not a string");
}

TEST_F(SafetensorsReject, MissingField) {
  RefusesHeader(R"({"w":{"shape":[16],"data_offsets":[0,16]}})", "no dtype");
  RefusesHeader(R"({"w":{"dtype":"U8","data_offsets":[0,16]}})", "no shape");
  RefusesHeader(R"({"w":{"dtype":"U8","shape":[16]}})", "no data_offsets");
  RefusesHeader(R"({"w":3})", "not an object");
}

TEST_F(SafetensorsReject, UnknownField) {
  RefusesHeader(R"({"w":{"dtype":"U8","shape":[16],"data_offsets":[0,16],"stride":[1]}})",
                "fields besides");
}

TEST_F(SafetensorsReject, UnknownType) {
  RefusesEntry("\"F31\"", "[4]", "[0,16]", "dtype \"F31\" is unknown");
  RefusesEntry("\"f32\"", "[4]", "[0,16]", "dtype \"f32\" is unknown");
  RefusesEntry("32", "[4]", "[0,16]", "not a string");
}

TEST_F(SafetensorsReject, ShapeThatIsNoList) {
  RefusesEntry("\"U8\"", "16", "[0,16]", "not a list");
}

TEST_F(SafetensorsReject, ShapeOfOtherThanNaturalNumbers) {
  for (const std::string bad : {"-1", "-0", "16.0", "1e3", "\"16\"", "null", "true", "[16]"}) {
    RefusesEntry("\"U8\"", "[" + bad + "]", "[0,16]", "");
  }
  RefusesEntry("\"U8\"", "[-16]", "[0,16]", "not a natural number");
  RefusesEntry("\"U8\"", "[9223372036854775808]", "[0,16]", "too large");
  RefusesEntry("\"U8\"", "[18446744073709551616]", "[0,16]", "not a natural number");
}

TEST_F(SafetensorsReject, ElementCountThatOverflows) {
  RefusesEntry("\"U8\"", "[4611686018427387904,4]", "[0,16]", "elements overflows");
}

TEST_F(SafetensorsReject, ElementCountThatWrapsToZero) {
  RefusesEntry("\"U8\"", "[4294967296,4294967296]", "[0,0]", "elements overflows");
  RefusesEntry("\"U8\"", "[4294967296,4294967296,0]", "[0,0]", "elements overflows");
}

TEST_F(SafetensorsReject, ByteCountThatOverflows) {
  RefusesEntry("\"F64\"", "[4611686018427387904]", "[0,16]", "bytes overflows");
}

TEST_F(SafetensorsReject, OffsetsOtherThanTwoNumbers) {
  RefusesEntry("\"U8\"", "[16]", "[0]", "not two numbers");
  RefusesEntry("\"U8\"", "[16]", "[0,16,16]", "not two numbers");
  RefusesEntry("\"U8\"", "[16]", "{}", "not two numbers");
  RefusesEntry("\"U8\"", "[16]", "[0,16.0]", "not a natural number");
  RefusesEntry("\"U8\"", "[16]", "[-16,0]", "not a natural number");
}

TEST_F(SafetensorsReject, EndBeforeBegin) {
  RefusesEntry("\"U8\"", "[16]", "[16,0]", "before they begin");
}

TEST_F(SafetensorsReject, OffsetsThatDisagreeWithTheShape) {
  RefusesEntry("\"U8\"", "[15]", "[0,16]", "its shape and dtype need 15");
  RefusesEntry("\"F32\"", "[16]", "[0,16]", "its shape and dtype need 64");
}

TEST_F(SafetensorsReject, HoleBetweenTensors) {
  RefusesHeader("{" + Entry("\"U8\"", "[8]", "[0,8]", "a") + "," +
                    Entry("\"U8\"", "[7]", "[9,16]", "b") + "}",
                "tensor 'b': its data begin at 9");
}

TEST_F(SafetensorsReject, OverlappingTensors) {
  RefusesHeader("{" + Entry("\"U8\"", "[8]", "[0,8]", "a") + "," +
                    Entry("\"U8\"", "[9]", "[7,16]", "b") + "}",
                "tensor 'b': its data begin at 7");
  RefusesHeader("{" + Entry("\"U8\"", "[16]", "[0,16]", "a") + "," +
                    Entry("\"U8\"", "[16]", "[0,16]", "b") + "}",
                "tensor 'b': its data begin at 0");
}

TEST_F(SafetensorsReject, HoleBeforeTheFirstTensor) {
  RefusesEntry("\"U8\"", "[8]", "[8,16]", "begin at 8, but those before it end at 0");
}

TEST_F(SafetensorsReject, DataBeyondTheFile) {
  RefusesEntry("\"U8\"", "[17]", "[0,17]", "only 16 bytes of data");
}

TEST_F(SafetensorsReject, TrailingBytes) {
  RefusesEntry("\"U8\"", "[15]", "[0,15]", "end at 15, but the file has 16");
  RefusesHeader("{}", "end at 0, but the file has 16");
}

TEST_F(SafetensorsReject, TruncatedData) {
  const std::string whole =
      SafetensorsBytes("{" + Entry("\"F32\"", "[4]", "[0,16]") + "}", std::string(16, 'x'));
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    WriteFile(folder_ / "cut", whole.substr(0, bytes));
    EXPECT_ERROR(SafetensorsFile(folder_ / "cut"), "it is truncated");
  }
}

TEST_F(SafetensorsReject, BitsThatFillNoByte) {
  RefusesEntry("\"F4\"", "[33]", "[0,16]", "not a whole number of bytes");
  RefusesEntry("\"F6_E2M3\"", "[21]", "[0,15]", "not a whole number of bytes");
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
