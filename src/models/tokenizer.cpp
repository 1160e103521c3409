#include "tessera/models/tokenizer.h"
#include "tessera/data/detail/tokenizers.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "config_reader.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::models {
namespace {

constexpr std::int64_t kByteVocabulary = 256;

/// A tokenizer with more tokens than the model. encode() throws Error for a text with a token that
/// the model's embedding lacks.
class LimitedTokenizer final : public data::Tokenizer {
 public:
  LimitedTokenizer(data::TokenizerPtr all, std::int64_t limit)
      : all_(std::move(all)), limit_(limit) {}

  std::int64_t vocabulary() const override { return limit_; }
  std::vector<std::int64_t> encode(std::string_view text) const override {
    return checked(all_->encode(text));
  }
  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    return all_->decode(tokens);
  }
  std::vector<std::int64_t> begin_tokens() const override { return checked(all_->begin_tokens()); }
  std::vector<std::int64_t> end_tokens() const override { return checked(all_->end_tokens()); }
  std::optional<bool> begins_texts() const override { return all_->begins_texts(); }

 private:
  std::vector<std::int64_t> checked(std::vector<std::int64_t> ids) const {
    for (const std::int64_t id : ids) {
      TESSERA_CHECK(id < limit_, "the tokenizer has ", all_->vocabulary(),
                    " tokens, but the model's vocabulary is ", limit_,
                    ", and a text has the token ", id,
                    "; pass the tokenizer that it was trained with");
    }
    return ids;
  }

  data::TokenizerPtr all_;
  std::int64_t limit_;
};

}  // namespace

std::string tokenizer_file(const std::string& file, const std::filesystem::path& folder) {
  const std::filesystem::path path = file.empty() ? folder : std::filesystem::path(file);
  if (!std::filesystem::is_directory(path)) {
    return file;
  }
  // If the folder has no tokenizer, the path is returned unchanged, and opening the path throws the
  // error.
  return data::find_tokenizer(path).value_or(file);
}

/// A model with 256 tokens is assumed to use bytes. In other models, byte values would be ids of
/// unrelated tokens.
data::TokenizerPtr open_tokenizer(const std::string& file, const std::filesystem::path& folder,
                                  const LlamaConfig& config, bool new_to_text) {
  const std::string found = tokenizer_file(file, folder);
  TESSERA_CHECK(!found.empty() || new_to_text || config.vocab_size == kByteVocabulary,
                "no tokenizer was passed, and no tokenizer.json or tokenizer.model is beside the "
                "model, so that a text is read as bytes, but the model's vocabulary is ",
                config.vocab_size, "; pass the tokenizer of the model or of the tokens");
  data::TokenizerPtr tokenizer =
      found.empty() ? data::byte_tokenizer() : data::open_tokenizer(found);
  return tokenizer->vocabulary() <= config.vocab_size
             ? tokenizer
             : std::make_shared<LimitedTokenizer>(std::move(tokenizer), config.vocab_size);
}

/// generation_config.json takes precedence: for chat models generation_config.json is newer than
/// config.json.
SpecialTokens read_special_tokens(const std::filesystem::path& folder, const LlamaConfig& config) {
  const std::string of_model = (folder / "config.json").string();
  const std::filesystem::path file = folder / "generation_config.json";
  const std::string of_generation = file.string();
  const nlohmann::json model = parse_object(config.json, of_model);
  const nlohmann::json generation =
      std::filesystem::exists(file)
          ? parse_object(
                files::read_file(file, "a Hugging Face generation_config.json", kMaxConfigBytes),
                of_generation)
          : nlohmann::json::object();
  const auto tokens = [&](const char* key) {
    const ConfigReader reader(generation, of_generation);
    return (reader.has(key) ? reader : ConfigReader(model, of_model))
        .tokens(key, config.vocab_size);
  };
  const std::vector<std::int64_t> begin =
      config.begins_texts ? tokens("bos_token_id") : std::vector<std::int64_t>{};
  TESSERA_CHECK(begin.size() <= 1, folder.string(), ": \"bos_token_id\" has ", begin.size(),
                " tokens; a text begins with one");
  return {begin, tokens("eos_token_id")};
}

SpecialTokens special_tokens_of(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "config.json";
  if (folder.empty() || !std::filesystem::exists(file)) {
    return {};
  }
  return read_special_tokens(folder, read_config(file));
}

std::vector<std::int64_t> document_end(const data::Tokenizer* tokenizer,
                                       const SpecialTokens& special) {
  std::vector<std::int64_t> end;
  if (tokenizer != nullptr) {
    end = tokenizer->end_tokens();
  }
  if (end.empty() && !special.end.empty()) {
    end = {special.end.front()};
  }
  return end;
}

std::vector<std::int64_t> text_begin(const data::Tokenizer& tokenizer,
                                     const SpecialTokens& special) {
  const std::optional<bool> begins = tokenizer.begins_texts();
  if (!begins) {
    return special.begin;
  }
  return *begins ? tokenizer.begin_tokens() : std::vector<std::int64_t>{};
}

}  // namespace tessera::models
