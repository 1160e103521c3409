// By Meta's package llama-models, where they are in the code beside each file.

#include "tokenizer/tiktoken_models.h"

#include <algorithm>
#include <array>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

constexpr const char* kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
/// That of OpenAI's o200k_base: words are split before a capital, and have their contractions.
constexpr const char* kLlama4Pattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

void append(std::vector<std::string>& names, std::initializer_list<const char*> more) {
  for (const char* name : more) {
    names.push_back("<|" + std::string(name) + "|>");
  }
}

/// The reserved ones of a group from `first` on, until there are `total` names.
void append_reserved(std::vector<std::string>& names, const std::string& group, int first,
                     std::size_t total) {
  for (int i = first; names.size() < total; ++i) {
    names.push_back("<|" + group + "reserved_special_token_" + std::to_string(i) + "|>");
  }
}

/// Those of Llama 3.1 to 3.3; Llama 3.0's are the same, or reserved.
std::vector<std::string> llama3_special_tokens() {
  std::vector<std::string> names;
  append(names, {"begin_of_text", "end_of_text", "reserved_special_token_0",
                 "reserved_special_token_1", "finetune_right_pad_id", "step_id", "start_header_id",
                 "end_header_id", "eom_id", "eot_id", "python_tag", "image"});
  append_reserved(names, "", 2, 256);
  return names;
}

std::vector<std::string> llama4_special_tokens() {
  std::vector<std::string> names;
  append(names, {"begin_of_text", "end_of_text", "fim_prefix", "fim_middle", "fim_suffix",
                 "header_start", "header_end", "eom", "eot", "step"});
  append_reserved(names, "text_post_train_", 0, 16);
  append(names, {"python_start", "python_end", "finetune_right_pad"});
  append_reserved(names, "text_post_train_", 8, 80);
  append(names, {"image_start", "image_end", "vision_reserved_special_token_0",
                 "vision_reserved_special_token_1", "tile_x_separator", "tile_y_separator"});
  append_reserved(names, "vision_", 2, 90);
  append(names, {"image", "vision_reserved_special_token_6", "patch"});
  append_reserved(names, "vision_", 7, 1134);
  append_reserved(names, "reasoning_", 0, 1142);
  append(names, {"reasoning_thinking_start", "reasoning_thinking_end"});
  append_reserved(names, "", 0, 2048);
  return names;
}

/// By TiktokenModel.
constexpr std::array<TiktokenModelParts, 2> kModels{
    {{"Llama 3", 128'000, kLlama3Pattern, llama3_special_tokens},
     {"Llama 4", 200'000, kLlama4Pattern, llama4_special_tokens}}};

}  // namespace

const TiktokenModelParts& parts_of(TiktokenModel model) {
  return kModels.at(static_cast<std::size_t>(model));
}

TiktokenModel tiktoken_model_of(std::size_t ranks) {
  const auto* const found = std::ranges::find(kModels, ranks, &TiktokenModelParts::ranks);
  if (found == kModels.end()) {
    std::string known;
    for (const TiktokenModelParts& model : kModels) {
      known += (known.empty() ? "" : ", ") + std::string(model.name) + "'s has " +
               std::to_string(model.ranks);
    }
    fail("it has ", ranks, " tokens (", known,
         "): of another model use its tokenizer.json instead");
  }
  return static_cast<TiktokenModel>(found - kModels.begin());
}

}  // namespace tessera::data
