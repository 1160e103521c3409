#include "examples/llama/model/text_ends.h"

namespace llama {

SpecialTokens special_tokens_of(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "config.json";
  if (folder.empty() || !std::filesystem::exists(file)) {
    return {};
  }
  return read_special_tokens(folder, read_config(file));
}

std::optional<std::int64_t> document_end(const tessera::data::Tokenizer* tokenizer,
                                         const SpecialTokens& special) {
  if (tokenizer != nullptr && tokenizer->end_token()) {
    return tokenizer->end_token();
  }
  return special.end.empty() ? std::nullopt : std::optional(special.end.front());
}

std::optional<std::int64_t> text_begin(const tessera::data::Tokenizer& tokenizer,
                                       const SpecialTokens& special) {
  const std::optional<bool> begins = tokenizer.begins_texts();
  if (!begins) {
    return special.begin;
  }
  return *begins ? tokenizer.begin_token() : std::nullopt;
}

}  // namespace llama
