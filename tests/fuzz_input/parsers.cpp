// The fuzz target. TESSERA_FUZZ_PARSER names the parser to test. A parser must accept the fuzzer's
// bytes or throw an Error with a message of one line; otherwise the process ends.

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/manifest.h"
#include "checkpoint/model_folder.h"
#include "fuzz_input/samples.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/data/detail/tokenizers.h"
#include "tessera/data/tokenizer.h"
#include "tessera/models/llama_config.h"

namespace tessera::fuzz_input {
namespace {

template <class Parse>
void parse_or_refuse(const Parse& parse) {
  try {
    parse();
  } catch (const Error& error) {
    const std::string_view message = error.what();
    if (message.empty() || message.find('\n') != message.npos) {
      std::fprintf(stderr, "the message is not one line: %s\n", error.what());
      std::abort();
    }
  }
}

const std::filesystem::path& own_folder() {
  static const std::filesystem::path folder = [] {
    const std::filesystem::path memory = "/dev/shm";
    std::string name =
        ((std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path()) /
         "tessera-fuzz-XXXXXX")
            .string();
    if (mkdtemp(name.data()) == nullptr) {
      std::abort();
    }
    std::atexit([] { std::filesystem::remove_all(own_folder()); });
    return std::filesystem::path(name);
  }();
  return folder;
}

std::filesystem::path write_input(const std::string& name, const std::string& bytes) {
  const std::filesystem::path path = own_folder() / name;
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  return path;
}

void parse_config(const std::string& text) {
  const models::LlamaConfig config = models::detail::parse_config(text, "config.json");
  models::count_parameters(config);
  models::check_tensor_parallel(config, 2);
}

/// Parses a model.safetensors.index.json, with two valid shards in the folder.
void parse_index(const std::string& text) {
  static const bool written = (write_shards(own_folder()), true);
  static_cast<void>(written);
  write_input(checkpoint::kIndexFile, text);
  const checkpoint::ModelFiles files(own_folder());
}

/// Parses a manifest.json. Appends the correct checksum, because mutated bytes never have it.
void parse_manifest(const std::string& text) {
  const std::uint32_t sum = detail::crc32c(std::as_bytes(std::span(text)));
  const std::string whole = text + fmt::format(",\"crc32c\":\"{:08x}\"}}\n", sum);
  const std::string again = to_text(checkpoint::parse_manifest(whole, "manifest.json"));
  if (to_text(checkpoint::parse_manifest(again, "manifest.json")) != again) {
    std::abort();
  }
}

void parse_safetensors(const std::string& text) {
  const checkpoint::SafetensorsFile file(write_input("model.safetensors", text));
  for (const auto& tensor : file.tensors()) {
    parse_or_refuse([&] { file.read(tensor.first); });
  }
}

/// Parses DCP_SHARDING_INFO, in which PyTorch's writer stores the offsets of a shard file's blocks.
void parse_sharding_info(const std::string& text) {
  write_input("shard-00001-model-00001-of-00001.safetensors", shard_with(text));
  checkpoint::manifest_of_shards(own_folder());
}

void parse_tiktoken(const std::string& text) {
  data::tiktoken_tokenizer(write_input("tokenizer.model", text));
}

void parse_tokenizer(const std::string& text) {
  const auto tokenizer = data::sentencepiece_tokenizer(write_input("tokenizer.model", text));
  tokenizer->decode(tokenizer->encode("a bc a"));
}

void parse_tokenizer_json(const std::string& text) {
  const auto tokenizer = data::open_tokenizer(write_input("tokenizer.json", text));
  tokenizer->decode(tokenizer->encode("a bc  a<s>1\xc3"));
}

using Parser = void (*)(const std::string&);

Parser chosen_parser() {
  const std::map<std::string, Parser> parsers{{"config", parse_config},
                                              {"index", parse_index},
                                              {"manifest", parse_manifest},
                                              {"safetensors", parse_safetensors},
                                              {"sharding_info", parse_sharding_info},
                                              {"tiktoken", parse_tiktoken},
                                              {"tokenizer", parse_tokenizer},
                                              {"tokenizer_json", parse_tokenizer_json}};
  const char* name = std::getenv("TESSERA_FUZZ_PARSER");
  const auto found = parsers.find(name != nullptr ? name : "");
  if (found == parsers.end()) {
    std::fprintf(stderr, "TESSERA_FUZZ_PARSER is '%s': name a parser of scripts/fuzz\n",
                 name != nullptr ? name : "");
    std::exit(2);
  }
  return found->second;
}

}  // namespace
}  // namespace tessera::fuzz_input

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera::fuzz_input;
  static const Parser parse = chosen_parser();
  const std::string text(reinterpret_cast<const char*>(bytes), size);
  parse_or_refuse([&] { parse(text); });
  return 0;
}
