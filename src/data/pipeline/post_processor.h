#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/json_field.h"
#include "pipeline/token_id.h"

namespace tessera::data {

/// The tokens that a template puts around a text.
struct TemplateTokens {
  std::vector<std::int64_t> begin;
  std::vector<std::int64_t> end;
};

/// The tokens of a tokenizer.json's "post_processor". Throws Error if it is not implemented, and
/// for tokens outside of the vocabulary.
TemplateTokens read_post_processor(const JsonField& field, TokenId vocabulary);

}  // namespace tessera::data
