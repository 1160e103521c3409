#include "tokenizer_parts.h"

#include <algorithm>
#include <charconv>

#include "unicode.h"

namespace tessera::data {
namespace {

const nlohmann::json kNull;
constexpr std::size_t kMaxShown = 80;

/// Returns a JSON value as ASCII text of limited length for messages, because keys and texts of an
/// untrusted file can contain any characters.
std::string short_text(const nlohmann::json& value) {
  const std::string text = value.dump(-1, ' ', true);
  return text.size() <= kMaxShown ? text : text.substr(0, kMaxShown) + "...";
}

}  // namespace

JsonField JsonField::at(const char* key) const {
  require(value_.is_object(), "an object");
  const auto found = value_.find(key);
  return {found == value_.end() ? kNull : *found, place_.empty() ? key : place_ + "." + key};
}

const std::string& JsonField::text() const {
  require(value_.is_string(), "a string");
  return value_.get_ref<const std::string&>();
}

const std::string& JsonField::character() const {
  const std::string& all = text();
  require(!all.empty() && first_character(all).bytes == all.size(), "one character");
  return all;
}

bool JsonField::flag_or(bool otherwise) const {
  require(is_null() || value_.is_boolean(), "true or false");
  return is_null() ? otherwise : value_.get<bool>();
}

std::uint32_t JsonField::number_below(std::uint32_t limit) const {
  require(value_.is_number_unsigned() && value_.get<std::uint64_t>() < limit,
          "a number below " + std::to_string(limit));
  return value_.get<std::uint32_t>();
}

void JsonField::only(std::initializer_list<std::string_view> keys) const {
  require(value_.is_object(), "an object");
  for (const auto& [key, value] : value_.items()) {
    if (key != "type" && std::ranges::find(keys, key) == keys.end()) {
      JsonField(value, place_.empty() ? key : place_ + "." + key).refuse();
    }
  }
}

void JsonField::require(bool condition, std::string_view what) const {
  TESSERA_CHECK(condition, short_text(nlohmann::json(place_)), " is ", shown(), "; it must be ",
                what);
}

void JsonField::refuse() const {
  fail(short_text(nlohmann::json(place_)), " is ", shown(),
       ", which is not implemented; use a tokenizer without this setting");
}

std::string JsonField::shown() const {
  if (value_.is_structured() && value_.size() > kMaxShown) {
    return std::string("an ") + value_.type_name() + " of " + std::to_string(value_.size());
  }
  return short_text(value_);
}

AddedToken added_token_of(const JsonField& field, bool special) {
  for (const char* option : {"single_word", "lstrip", "rstrip"}) {
    if (const JsonField flag = field.at(option); flag.flag_or(false)) {
      flag.refuse();
    }
  }
  AddedToken token;
  token.content = field.at("content").text();
  token.special = field.at("special").flag_or(special);
  token.normalized = field.at("normalized").flag_or(!token.special);
  return token;
}

AddedTokens::AddedTokens(const std::vector<AddedToken>& tokens) {
  for (const AddedToken& token : tokens) {
    std::vector<std::size_t>& sizes = sizes_[static_cast<unsigned char>(token.content[0])];
    if (std::ranges::find(sizes, token.content.size()) == sizes.end()) {
      sizes.push_back(token.content.size());
      std::ranges::sort(sizes, std::greater());
    }
    tokens_[token.content] = token;
  }
}

const AddedToken* AddedTokens::match_at(std::string_view text) const {
  for (const std::size_t size : sizes_[static_cast<unsigned char>(text[0])]) {
    const auto found = size <= text.size() ? tokens_.find(text.substr(0, size)) : tokens_.end();
    if (found != tokens_.end()) {
      return &found->second;
    }
  }
  return nullptr;
}

void AddedTokens::split(std::string_view text, OnText on_text, OnToken on_token) const {
  std::size_t given = 0;
  const auto give_to = [&](std::size_t end) {
    if (given < end) {
      on_text(text.substr(given, end - given), given == 0);
    }
  };
  for (std::size_t at = 0; at < text.size();) {
    if (const AddedToken* token = match_at(text.substr(at))) {
      give_to(at);
      on_token(token->id);
      given = at = at + token->content.size();
    } else {
      ++at;
    }
  }
  give_to(text.size());
}

namespace {

/// The code point that represents each byte in GPT-2's alphabet. Printable bytes of Latin-1
/// represent themselves. U+0100, U+0101 and so on represent the other bytes in their order.
constexpr std::array<char32_t, 256> kCodePoints = [] {
  std::array<char32_t, 256> codes{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    codes[byte] = printable ? byte : next++;
  }
  return codes;
}();
constexpr char32_t kAlphabetEnd = 0x144;
constexpr int kNoByte = -1;

/// The inverse of kCodePoints: the byte for each code point of GPT-2's alphabet.
constexpr std::array<int, kAlphabetEnd> kByteOfCodePoint = [] {
  std::array<int, kAlphabetEnd> bytes{};
  bytes.fill(kNoByte);
  for (int byte = 0; byte < 256; ++byte) {
    bytes[kCodePoints[static_cast<std::size_t>(byte)]] = byte;
  }
  return bytes;
}();

}  // namespace

std::optional<std::string> bytes_of_token(std::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const Utf8Step step = first_character(token);
    const char32_t code = step.valid ? code_point(token.substr(0, step.bytes)) : kAlphabetEnd;
    if (code >= kAlphabetEnd || kByteOfCodePoint[code] == kNoByte) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(kByteOfCodePoint[code]));
    token.remove_prefix(step.bytes);
  }
  return bytes;
}

std::optional<unsigned char> byte_of_fallback_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) {
    return std::nullopt;
  }
  unsigned char byte = 0;
  const char* end = token.data() + 5;
  const auto [stop, error] = std::from_chars(token.data() + 3, end, byte, 16);
  return error == std::errc{} && stop == end ? std::optional(byte) : std::nullopt;
}

void check_growth(std::size_t from, std::size_t to) {
  constexpr std::size_t kMaxGrowth = 32;
  constexpr std::size_t kFree = 1000;
  TESSERA_CHECK(to <= kFree + kMaxGrowth * from, "the tokenizer's replacements make a text of ",
                from, " bytes more than ", kMaxGrowth,
                " times longer; use a tokenizer whose normalizer and decoder replace less");
}

namespace {

using Replace = std::function<std::string(std::string_view text)>;

Replace read_replace(const JsonField& field) {
  field.only({"pattern", "content"});
  const JsonField pattern = field.at("pattern");
  pattern.only({"String"});
  const std::string& replaced = pattern.at("String").text();
  pattern.require(!replaced.empty(), "a text that is not empty");
  return [replaced, content = field.at("content").text()](std::string_view text) {
    std::string out;
    std::size_t copied = 0;
    for (std::size_t at = text.find(replaced); at != std::string_view::npos;
         at = text.find(replaced, copied)) {
      out += text.substr(copied, at - copied);
      out += content;
      check_growth(text.size(), out.size());
      copied = at + replaced.size();
    }
    return out += text.substr(copied);
  };
}

void add_normalizer(const JsonField& field, Normalizers& steps) {
  const std::string& type = field.type();
  if (type == "Sequence") {
    field.only({"normalizers"});
    field.at("normalizers").for_each([&](const JsonField& step) { add_normalizer(step, steps); });
  } else if (type == "Prepend") {
    field.only({"prepend"});
    steps.emplace_back([prefix = field.at("prepend").text()](std::string& text) {
      text.insert(0, text.empty() ? "" : prefix);
    });
  } else if (type == "NFC") {
    field.only({});
    steps.emplace_back([](std::string& text) { text = to_nfc(text); });
  } else if (type == "Replace") {
    steps.emplace_back(
        [replace = read_replace(field)](std::string& text) { text = replace(text); });
  } else {
    field.at("type").refuse();
  }
}

/// Returns a step that cuts texts at the matches of a regular expression. `removes`: whether
/// matches are dropped. `invert`: whether texts between matches count as matches.
PreTokenizers::Step split_step(std::string_view expression, bool removes, bool invert) {
  const auto pattern = std::make_shared<const Pattern>(expression);
  return [pattern, removes, invert](Piece piece, OnPiece on_piece) {
    std::size_t given = 0;
    const auto give_to = [&](std::size_t end, bool match) {
      if (given < end && !(removes && match)) {
        on_piece({piece.text.substr(given, end - given), piece.first && given == 0});
      }
      given = end;
    };
    pattern->for_each_match(piece.text, [&](std::size_t begin, std::size_t end) {
      give_to(begin, invert);
      give_to(end, !invert);
    });
    give_to(piece.text.size(), invert);
  };
}

PreTokenizers::Step read_split(const JsonField& field) {
  field.only({"pattern", "behavior", "invert"});
  const JsonField pattern = field.at("pattern");
  pattern.only({"Regex"});
  const JsonField behavior = field.at("behavior");
  const bool removes = behavior.text() == "Removed";
  if (!removes && behavior.text() != "Isolated") {
    behavior.refuse();
  }
  return split_step(pattern.at("Regex").text(), removes, field.at("invert").flag_or(false));
}

/// Returns the piece's text with `mark` in place of each space character. If `prepended` is true,
/// the result begins with `mark`.
std::string marked(std::string_view piece, const std::string& mark, bool prepended) {
  std::string text;
  for (const char c : piece) {
    c == ' ' ? void(text += mark) : text.push_back(c);
  }
  return prepended && !text.starts_with(mark) ? mark + text : text;
}

/// Adds the pre-tokenizer Metaspace, which handles spaces as SentencePiece does.
void add_metaspace(const JsonField& field, PreTokenizers& all) {
  field.only({"replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  const JsonField scheme = field.at("prepend_scheme");
  const std::string prepend = scheme.is_null() ? "always" : scheme.text();
  if (prepend != "always" && prepend != "first" && prepend != "never") {
    scheme.refuse();
  }
  // Older files of the `tokenizers` package have add_prefix_space in place of prepend_scheme.
  if (const JsonField older = field.at("add_prefix_space");
      !older.flag_or(true) && prepend != "never") {
    older.refuse();
  }
  all.steps.emplace_back([prepend, mark = field.at("replacement").character(),
                          splits = field.at("split").flag_or(true)](Piece piece, OnPiece on_piece) {
    const std::string text =
        marked(piece.text, mark, prepend == "always" || (prepend == "first" && piece.first));
    // Each mark (the symbol for a space) begins a new word.
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end =
          splits ? std::min(text.find(mark, begin + 1), text.size()) : text.size();
      on_piece({std::string_view(text).substr(begin, end - begin), piece.first && begin == 0});
      begin = end;
    }
  });
}

/// Adds the pre-tokenizer ByteLevel. The text is not converted to GPT-2's alphabet; instead the
/// model's vocabulary is converted to bytes.
void add_byte_level(const JsonField& field, PreTokenizers& all) {
  /// GPT-2's regular expression for splitting texts, used if "use_regex" is true.
  constexpr const char* kGpt2Pattern =
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
  field.only({"add_prefix_space", "trim_offsets", "use_regex"});
  if (field.at("add_prefix_space").flag_or(true)) {
    all.steps.emplace_back([](Piece piece, OnPiece on_piece) {
      const std::string text = (piece.text.starts_with(' ') ? "" : " ") + std::string(piece.text);
      on_piece({text, piece.first});
    });
  }
  if (field.at("use_regex").flag_or(true)) {
    all.steps.push_back(split_by_pattern(kGpt2Pattern));
  }
  all.byte_level = true;
}

void add_pre_tokenizer(const JsonField& field, PreTokenizers& all) {
  const std::string& type = field.type();
  // Refuses a step after ByteLevel: the step would expect a text in GPT-2's alphabet, not bytes.
  field.require(type == "Sequence" || !all.byte_level, "before ByteLevel");
  if (type == "Sequence") {
    field.only({"pretokenizers"});
    field.at("pretokenizers").for_each([&](const JsonField& step) {
      add_pre_tokenizer(step, all);
    });
  } else if (type == "Split") {
    all.steps.push_back(read_split(field));
  } else if (type == "ByteLevel") {
    add_byte_level(field, all);
  } else if (type == "Metaspace") {
    add_metaspace(field, all);
  } else if (type == "Digits") {
    field.only({"individual_digits"});
    const bool each = field.at("individual_digits").flag_or(false);
    all.steps.push_back(
        split_step(each ? R"(\p{N})" : R"(\p{N}+)", /*removes=*/false, /*invert=*/false));
  } else {
    field.at("type").refuse();
  }
}

/// Adds the decoder Strip, which removes a character up to `left` times from the beginning and up
/// to `right` times from the end of each token.
void add_strip(const JsonField& field, Decoders& steps) {
  constexpr std::uint32_t kMaxStripped = 1000;
  field.only({"content", "start", "stop"});
  steps.emplace_back([character = field.at("content").character(),
                      left = field.at("start").number_below(kMaxStripped),
                      right = field.at("stop").number_below(kMaxStripped)](auto& tokens) {
    for (std::string& token : tokens) {
      std::string_view rest = token;
      for (std::uint32_t i = 0; i < left && rest.starts_with(character); ++i) {
        rest.remove_prefix(character.size());
      }
      for (std::uint32_t i = 0; i < right && rest.ends_with(character); ++i) {
        rest.remove_suffix(character.size());
      }
      token = std::string(rest);
    }
  });
}

void add_decoder(const JsonField& field, Decoders& steps) {
  const std::string& type = field.type();
  const auto add_for_each = [&](auto change) {
    steps.emplace_back([change](auto& tokens) { std::ranges::for_each(tokens, change); });
  };
  const auto add_fuse = [&] {
    steps.emplace_back([](auto& tokens) {
      std::string text;
      for (const std::string& token : tokens) {
        text += token;
      }
      tokens.assign(1, text);
    });
  };
  if (type == "Sequence") {
    field.only({"decoders"});
    field.at("decoders").for_each([&](const JsonField& step) { add_decoder(step, steps); });
  } else if (type == "ByteLevel") {
    field.only({"add_prefix_space", "trim_offsets", "use_regex"});
    // A token with characters outside GPT-2's alphabet is not converted to bytes.
    add_for_each([](std::string& token) { token = bytes_of_token(token).value_or(token); });
    add_fuse();
  } else if (type == "ByteFallback") {
    field.only({});
    add_for_each([](std::string& token) {
      if (const auto byte = byte_of_fallback_token(token)) {
        token.assign(1, static_cast<char>(*byte));
      }
    });
  } else if (type == "Replace") {
    // Incomplete UTF-8 characters are not replaced, because further tokens can complete them.
    add_for_each([replace = read_replace(field)](std::string& token) {
      std::string storage;
      if (replace_invalid_utf8(token, storage).data() == token.data()) {
        token = replace(token);
      }
    });
  } else if (type == "Strip") {
    add_strip(field, steps);
  } else if (type == "Fuse") {
    field.only({});
    add_fuse();
  } else {
    field.at("type").refuse();
  }
}

/// Appends the ids of the special token `name` to `tokens`. The ids are in `special_tokens`.
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
    piece.require(!behind && piece.at("Sequence").at("id").text() == "A", "the only Sequence A");
    behind = true;
  });
  single.require(behind, "a list with a Sequence A");
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
    // Throws Error for a second template that adds tokens. The `tokenizers` package would treat the
    // result of the first template as a pair of texts.
    field.require(tokens.begin.empty() && tokens.end.empty(), "the only template with tokens");
    tokens = read_template(field, vocabulary);
  } else if (type != "ByteLevel") {  // the post-processor ByteLevel needs no step
    field.at("type").refuse();
  }
}

template <class Steps>
Steps read_steps(const JsonField& field, void (*add)(const JsonField& field, Steps& steps)) {
  Steps steps;
  if (!field.is_null()) {
    add(field, steps);
  }
  return steps;
}

}  // namespace

Normalizers read_normalizers(const JsonField& field) {
  return read_steps<Normalizers>(field, add_normalizer);
}

Decoders read_decoders(const JsonField& field) {
  return read_steps<Decoders>(field, add_decoder);
}

PreTokenizers read_pre_tokenizers(const JsonField& field) {
  return read_steps<PreTokenizers>(field, add_pre_tokenizer);
}

void PreTokenizers::split_from(std::size_t step, Piece piece, OnPiece on_piece) const {
  if (step == steps.size()) {
    on_piece(piece);
    return;
  }
  // NOLINTNEXTLINE(misc-no-recursion): the recursion depth is the number of steps.
  steps[step](piece, [&](Piece part) { split_from(step + 1, part, on_piece); });
}

PreTokenizers::Step split_by_pattern(std::string_view expression) {
  return split_step(expression, /*removes=*/false, /*invert=*/false);
}

TemplateTokens read_post_processor(const JsonField& field, TokenId vocabulary) {
  TemplateTokens tokens;
  if (!field.is_null()) {
    add_post_processor(field, vocabulary, tokens);
  }
  return tokens;
}

}  // namespace tessera::data
