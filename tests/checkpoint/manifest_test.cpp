// Manifests and shards of strangers: their checksums are right, and what they say is not.

#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "saved_state.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/crc32c.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;
using testing::ReadFile;
using testing::TemporaryFolder;

constexpr std::uint64_t kLargest = std::numeric_limits<std::uint64_t>::max();

/// With the checksum that such a text needs.
std::string Sealed(json root) {
  root.erase("crc32c");
  std::string text = root.dump();
  text.pop_back();
  const std::uint32_t sum = detail::crc32c(std::as_bytes(std::span(text)));
  return text + fmt::format(",\"crc32c\":\"{:08x}\"}}\n", sum);
}

TEST(HostileManifest, IsRefusedByWhatItSays) {
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
      {"/files/0/bytes", -1, "the size of a file holds -1, which is not a natural number"},
      {"/files/0/bytes", 1.5, "the size of a file holds 1.5"},
      {"/files/0/bytes", true, "the size of a file holds boolean"},
      {"/files/0/bytes", kLargest, "which is too large"},
      {"/files/0/bytes", std::int64_t{1} << 62, "has checksums for another size"},
      {"/files/0/crc32c", "", "' has no checksums"},
      {"/files/0/name", "../x", "is no shard of a step"},
      {"/step", -3, "the step holds -3"},
      {"/world_size", std::int64_t{1} << 32, "world_size is 4294967296, which is too large"},
      {"/mesh/sizes/0", -2, "the mesh holds -2"},
      {"/entries", json::array(), "its entries are no object"},
      {tensor + "/sizes/0", -11, "tensor 'head.weight': its sizes holds -11"},
      {tensor + "/sizes/0", kLargest, "which is too large"},
      {tensor + "/sizes", std::vector<int>(65, 1), "has 65 dimensions"},
      {tensor + "/sizes", {std::int64_t{1} << 62, 5}, "overflows"},
      {tensor + "/dtype", "F33", "its dtype 'F33' is unknown"},
      {tensor + "/tied", {"../x"}, "looks like a path"},
      {tensor + "/tied", {"w\u009b2J"}, "control character"},
      {"/tensors/w\u202e", {}, "not valid: a tensor's name has a control character"},
      {tensor + "/chunks/0/file", 99, "a chunk is in file 99 of"},
      {tensor + "/chunks/0/file", kLargest, "the file of a chunk holds 18446744073709551615"},
      {tensor + "/chunks/0/offsets/0", -1, "a chunk's offsets holds -1"},
      {tensor + "/chunks/0/offsets/0", std::int64_t{1} << 62, "were asked for"},
      {tensor + "/chunks/0/sizes/0", 0.5, "a chunk's sizes holds 0.5"},
      {tensor + "/chunks", json::array(), "its chunks have 0 elements"}};
  for (const Case& each : cases) {
    json changed = valid;
    changed[json::json_pointer(each.at)] = each.value;
    EXPECT_ERROR(parse_manifest(Sealed(changed), "m"), "the manifest 'm' is not valid", each.error);
  }
}

TEST(HostileManifest, IsNeitherLoadedNorVerifiedWithoutChecksums) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const auto path = dir / "step-00000001/manifest.json";
  json root = json::parse(ReadFile(path));
  for (json& file : root["files"]) {
    file["crc32c"] = "";
  }
  testing::WriteFile(path, Sealed(root));
  EXPECT_ERROR(verify_step(dir / "step-00000001"), "has no checksums");
  EXPECT_ERROR(ExpectLoads(dir / "step-00000001", 0), "has no checksums");
}

/// As many as there are corners of a cube of 13 dimensions: each pair overlaps in some of them.
TEST(HostileManifest, IsRefusedSoonForTooManyAdjacentChunks) {
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

TEST(HostileShards, AreRefusedByTheirOffsets) {
  for (const auto& [info, error] :
       {std::pair{R"({"w":{"saved_offsets":[-1]}})", "its saved_offsets holds -1"},
        {R"({"w":{"saved_offsets":[0.5]}})", "its saved_offsets holds 0.5"},
        {R"({"w":{"saved_offsets":[9223372036854775807]}})", "begins at 9223372036854775807"},
        {R"({"w":{"saved_offsets":[18446744073709551615]}})", "which is too large"},
        {R"({"w":{"saved_offsets":[0,0]}})", "has other dimensions"},
        {R"({"w":{"saved_offsets":{}}})", "its saved_offsets is not a list"},
        {R"({"w":[]})", "DCP_SHARDING_INFO"},
        {R"({})", "lacks tensor 'w'"},
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

}  // namespace
}  // namespace tessera::checkpoint
