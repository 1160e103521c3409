#include "tessera/models/tokenizer.h"

namespace tessera::models {

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
