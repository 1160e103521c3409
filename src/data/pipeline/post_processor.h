#pragma once

#include <cstdint>
#include <vector>

#include "bpe/merge_table.h"
#include "tokenizer/json_field.h"

namespace tessera::data {

/// The tokens that a template puts around a text.
struct TemplateTokens {
  std::vector<std::int64_t> begin;
  std::vector<std::int64_t> end;
};

/// Of a tokenizer.json's "post_processor". Throws Error for what is not implemented and for tokens
/// outside of the vocabulary.
TemplateTokens read_post_processor(const JsonField& field, TokenId vocabulary);

}  // namespace tessera::data
