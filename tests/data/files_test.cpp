#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <numeric>
#include <utility>

#include "tessera/data/text.h"
#include "tessera/data/token_shards.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::data {
namespace {

using testing::TemporaryFolder;
using testing::WriteFile;

/// Returns the bytes of a file of tokens, made without the library's writer.
template <class Token>
std::string ShardBytes(std::int32_t magic, std::int32_t version, std::int32_t count,
                       const std::vector<Token>& tokens) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  return bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}

std::vector<std::int64_t> ReadAll(const TokenSource& source) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(source.size()));
  source.read(0, tokens);
  return tokens;
}

void WriteShard(const std::string& path, const std::vector<std::int64_t>& tokens,
                std::int64_t vocabulary = 65536) {
  TokenShardWriter writer(path, vocabulary);
  writer.append(tokens);
  writer.finish();
}

using Tokens = std::vector<std::int64_t>;

TEST(TokenShards, JoinFilesOfEachTokenWidth) {
  TemporaryFolder folder;
  WriteFile(folder / "b.bin", ShardBytes<std::uint16_t>(20240520, 1, 2, {3, 65535}));
  WriteFile(folder / "B.bin", ShardBytes<std::uint16_t>(20240520, 1, 2, {1, 0}));
  WriteFile(folder / "c.bin", ShardBytes<std::uint16_t>(20240520, 1, 0, {}));
  WriteFile(folder / "d.bin", ShardBytes<std::uint32_t>(20240801, 7, 2, {128255, 4294967295}));
  EXPECT_EQ(ReadAll(*open_token_shards(
                {folder / "B.bin", folder / "b.bin", folder / "c.bin", folder / "d.bin"})),
            (Tokens{1, 0, 3, 65535, 128255, 4294967295}));
}

TEST(TokenShards, ReadAcrossFileBoundaries) {
  TemporaryFolder folder;
  WriteFile(folder / "0.bin", ShardBytes<std::uint16_t>(20240520, 1, 3, {0, 1, 2}));
  WriteFile(folder / "1.bin", ShardBytes<std::uint16_t>(20240520, 1, 1, {3}));
  WriteFile(folder / "2.bin", ShardBytes<std::uint16_t>(20240520, 1, 3, {4, 5, 6}));
  const auto source = open_token_shards({folder / "0.bin", folder / "1.bin", folder / "2.bin"});
  for (std::int64_t begin = 0; begin <= 7; ++begin) {
    for (std::int64_t count = 0; begin + count <= 7; ++count) {
      Tokens expected(static_cast<std::size_t>(count)), found(expected.size());
      std::iota(expected.begin(), expected.end(), begin);
      source->read(begin, found);
      EXPECT_EQ(found, expected);
    }
  }
}

TEST(TokenShards, CanExceedTheLimitOfOpenFiles) {
  TemporaryFolder folder;
  Tokens expected;
  std::vector<std::string> files;
  for (std::uint16_t i = 0; i < 20; ++i) {
    files.push_back(folder / (std::to_string(10 + i) + ".bin"));
    WriteFile(files.back(), ShardBytes<std::uint16_t>(20240520, 1, 1, {i}));
    expected.push_back(i);
  }
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int next = dup(STDIN_FILENO);
  close(next);
  const rlimit few{static_cast<rlim_t>(next) + 3, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  Tokens found;
  const std::string error =
      testing::message_of([&] { found = ReadAll(*open_token_shards(files)); });
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(error, "");
  EXPECT_EQ(found, expected);
}

TEST(TokenShards, RefuseOutOfRangeReads) {
  const auto source = make_token_source({1, 2, 3});
  Tokens two(2);
  EXPECT_ERROR(source->read(2, two), "tokens [2, 4) were passed");
  EXPECT_ERROR(source->read(-1, two), "tokens [-1, 1) were passed");
}

std::size_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

TEST(TokensInMemory, UseTheSmallestIntegerType) {
  for (const auto& [largest, bytes] : std::vector<std::pair<std::int64_t, std::size_t>>{
           {255, 1}, {256, 2}, {65535, 2}, {65536, 4}, {std::int64_t{1} << 32, 8}}) {
    Tokens tokens(1 << 20, 7);
    tokens[5] = largest;
    const std::size_t before = HeapBytes();
    const TokenSourcePtr source = make_token_source(tokens);
    EXPECT_LT(HeapBytes() - before, (bytes << 20) + (1 << 16)) << largest;
    EXPECT_EQ(ReadAll(*source), tokens);
  }
}

TEST(TokenShards, RefuseMalformedFiles) {
  using Token = std::uint16_t;
  TemporaryFolder folder;
  EXPECT_ERROR(open_token_shards({folder.path()}), "not a regular file");
  for (const auto& [bytes, word] : std::vector<std::pair<std::string, const char*>>{
           {ShardBytes<Token>(20240521, 1, 1, {1}), "magic number is 20240521"},
           {ShardBytes<Token>(20240520, 2, 1, {1}), "version 2"},
           {std::string(1023, '\0'), "too few for the header"},
           {"", "has 0 bytes"},
           {ShardBytes<Token>(20240520, 1, 3, {1, 2}), "truncated"},
           {ShardBytes<Token>(20240520, 1, 1, {1, 2}), "damaged"},
           {ShardBytes<Token>(20240520, 1, -1, {}), "-1 tokens"}}) {
    WriteFile(folder / "a.bin", bytes);
    EXPECT_ERROR(open_token_shards({folder / "a.bin"}), word);
  }
}

TEST(WriteTokenShard, WritesTheBytesOfTheFormat) {
  TemporaryFolder folder;
  WriteShard(folder / "a.bin", Tokens{7, 0, 65535});
  EXPECT_EQ(testing::ReadFile(folder / "a.bin"),
            ShardBytes<std::uint16_t>(20240520, 1, 3, {7, 0, 65535}));
  WriteShard(folder / "b.bin", Tokens{128255}, 65537);
  EXPECT_EQ(testing::ReadFile(folder / "b.bin"),
            ShardBytes<std::uint32_t>(20240801, 7, 1, {128255}));
}

TEST(WriteTokenShard, RefusesInvalidTokensAndRemovesTheFile) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder / "taken");
  WriteFile(folder / "taken/x", "");
  const auto writing = [&](const char* name, const Tokens& tokens) {
    return [&folder, name, tokens] { WriteShard(folder / name, tokens); };
  };
  testing::expect_refusals({{"large", writing("a.bin", {1, 65536}), {"position 1"}},
                            {"negative", writing("a.bin", {-1}), {"token -1"}},
                            {"folder", writing("missing/a.bin", {1}), {"cannot write"}},
                            {"place", writing("taken", {1}), {"cannot put in place"}}});
  EXPECT_EQ(folder.files(), std::vector<std::string>{"taken"});
}

TEST(ReadText, ReadsEveryByte) {
  TemporaryFolder folder;
  for (const std::string& bytes : {std::string("a\0\r\n\xff", 5), std::string()}) {
    WriteFile(folder / "text", bytes);
    EXPECT_EQ(read_text(folder / "text"), bytes);
  }
  EXPECT_ERROR(read_text(folder / "missing"), "missing");
  EXPECT_ERROR(read_text(folder.path()), "is a folder");
}

FileFingerprint fingerprint(const std::string& path) {
  return fingerprints({path}).at(0);
}

TEST(Fingerprint, HasNameSizeAndChecksumOfTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.bin";
  // The fingerprint covers all bytes of a small file, but not the middle of a large file.
  for (const auto& [size, places] : std::vector<std::pair<std::size_t, std::vector<std::size_t>>>{
           {0, {}}, {10'000, {0, 4095, 4096, 9'999}}, {3'000'001, {0, 3'000'000}}}) {
    const std::string bytes(size, 'x');
    WriteFile(path, bytes);
    const FileFingerprint before = fingerprint(path);
    EXPECT_EQ(before.name, "a.bin");
    EXPECT_EQ(before.bytes, size);
    for (const std::size_t i : places) {
      std::string changed = bytes;
      changed[i] = 'y';
      WriteFile(path, changed);
      EXPECT_NE(fingerprint(path).sum, before.sum) << i;
    }
  }
  EXPECT_ERROR(fingerprint("/none/a.bin"), "/none/a.bin");
}

}  // namespace
}  // namespace tessera::data
