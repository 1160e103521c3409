// write_samples DIR: writes valid inputs for each parser to the folder DIR/PARSER.

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "data/small_tokenizers.h"
#include "fuzz_input/samples.h"

namespace {

namespace fs = std::filesystem;

void put(const fs::path& path, const std::string& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string bytes_of(const fs::path& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tessera::fuzz_input;
  if (argc != 2) {
    return 2;
  }
  const fs::path dir = argv[1];
  put(dir / "index/valid", index_of_shards());
  put(dir / "manifest/valid", manifest());
  put(dir / "safetensors/valid", shard_with(sharding_info()));
  put(dir / "sharding_info/valid", sharding_info());
  put(dir / "tokenizer/valid", tessera::data::SmallModel());
  put(dir / "tiktoken/valid", tessera::testing::TiktokenLines());
  put(dir / "tokenizer_json/bytes", tessera::testing::ByteLevelJson().dump());
  put(dir / "tokenizer_json/characters", tessera::testing::ByteFallbackJson().dump());
  for (const auto& entry : fs::directory_iterator(LLAMA_CONFIGS)) {
    put(dir / "config" / entry.path().filename(), bytes_of(entry.path()));
  }
  return 0;
}
