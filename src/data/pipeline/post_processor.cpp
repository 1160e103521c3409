#include "pipeline/post_processor.h"

namespace tessera::data {
namespace {

/// Adds the ids that "special_tokens" has by this name.
void add_special(const JsonField& name, const JsonField& special_tokens, TokenId vocabulary,
                 std::vector<std::int64_t>& tokens) {
  special_tokens.at(name.text().c_str()).at("ids").for_each([&](const JsonField& id) {
    tokens.push_back(id.number_below(vocabulary));
  });
}

TemplateTokens read_template(const JsonField& field, TokenId vocabulary) {
  field.only({"single", "pair", "special_tokens"});
  TemplateTokens tokens;
  bool behind = false;
  const JsonField single = field.at("single");
  single.for_each([&](const JsonField& piece) {
    piece.only({"SpecialToken", "Sequence"});
    const JsonField special = piece.at("SpecialToken");
    if (!special.is_null()) {
      add_special(special.at("id"), field.at("special_tokens"), vocabulary,
                  behind ? tokens.end : tokens.begin);
      return;
    }
    piece.require(!behind && piece.at("Sequence").at("id").text() == "A", "the text, once");
    behind = true;
  });
  single.require(behind, "a list with the text");
  return tokens;
}

void add_post_processor(const JsonField& field, TokenId vocabulary, TemplateTokens& tokens) {
  const std::string& type = field.type();
  if (type == "Sequence") {
    field.only({"processors"});
    field.at("processors").for_each([&](const JsonField& step) {
      add_post_processor(step, vocabulary, tokens);
    });
  } else if (type == "TemplateProcessing") {
    // It takes the existing template for a pair of texts.
    field.require(tokens.begin.empty() && tokens.end.empty(), "the only template with tokens");
    tokens = read_template(field, vocabulary);
  } else if (type != "ByteLevel") {  // that one only changes offsets into the text
    field.at("type").refuse();
  }
}

}  // namespace

TemplateTokens read_post_processor(const JsonField& field, TokenId vocabulary) {
  TemplateTokens tokens;
  if (!field.is_null()) {
    add_post_processor(field, vocabulary, tokens);
  }
  return tokens;
}

}  // namespace tessera::data
