#include "pipeline/post_processor.h"

namespace tessera::data {
namespace {

/// A special token of a template's list: by its name in "special_tokens".
std::int64_t token_of_template(const JsonField& piece, const JsonField& special_tokens,
                               TokenId vocabulary) {
  const JsonField name = piece.at("id");
  const JsonField ids = special_tokens.at(name.text().c_str()).at("ids");
  ids.require(ids.json().is_array() && ids.json().size() == 1, "a list of one token");
  std::int64_t token = 0;
  ids.for_each([&](const JsonField& id) { token = id.number_below(vocabulary); });
  return token;
}

TemplateTokens read_template(const JsonField& field, TokenId vocabulary) {
  field.only({"single", "pair", "special_tokens"});
  TemplateTokens tokens;
  bool behind = false;
  field.at("single").for_each([&](const JsonField& piece) {
    piece.only({"SpecialToken", "Sequence"});
    const JsonField special = piece.at("SpecialToken");
    if (special.is_null()) {
      behind = true;
      return;
    }
    std::optional<std::int64_t>& end = behind ? tokens.end : tokens.begin;
    piece.require(!end, "the only token on this side of the text");
    end = token_of_template(special, field.at("special_tokens"), vocabulary);
  });
  return tokens;
}

}  // namespace

TemplateTokens read_post_processor(const JsonField& field, TokenId vocabulary) {
  if (field.is_null()) {
    return {};
  }
  const std::string& type = field.type();
  TemplateTokens tokens;
  if (type == "Sequence") {
    field.only({"processors"});
    field.at("processors").for_each([&](const JsonField& step) {
      const TemplateTokens of_step = read_post_processor(step, vocabulary);
      tokens.begin = of_step.begin ? of_step.begin : tokens.begin;
      tokens.end = of_step.end ? of_step.end : tokens.end;
    });
  } else if (type == "TemplateProcessing") {
    tokens = read_template(field, vocabulary);
  } else if (type != "ByteLevel") {  // that one only changes offsets into the text
    field.at("type").refuse();
  }
  return tokens;
}

}  // namespace tessera::data
