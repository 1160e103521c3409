#include "pipeline/decoders.h"

#include "pipeline/byte_alphabet.h"
#include "pipeline/replacement.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

/// A token with another character is text.
class ByteLevelDecoder final : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      if (auto bytes = bytes_of_token(token)) {
        token = std::move(*bytes);
      }
    }
  }
};

class ByteFallbackDecoder final : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      if (const auto byte = byte_of_fallback_token(token)) {
        token.assign(1, static_cast<char>(*byte));
      }
    }
  }
};

class MetaspaceDecoder final : public Decoder {
 public:
  MetaspaceDecoder(std::string mark, bool prepended)
      : mark_(std::move(mark)), prepended_(prepended) {}

  void apply(std::vector<std::string>& tokens) const override {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      // The space before the first word is not of the text.
      replace_marks(tokens[i], i == 0 && prepended_ ? "" : " ");
    }
  }

 private:
  void replace_marks(std::string& token, std::string_view space) const {
    for (std::size_t at = token.find(mark_); at != std::string::npos;
         at = token.find(mark_, at + space.size())) {
      token.replace(at, mark_.size(), space);
    }
  }

  std::string mark_;
  bool prepended_;
};

class ReplaceDecoder final : public Decoder {
 public:
  explicit ReplaceDecoder(Replacement replacement) : replacement_(std::move(replacement)) {}

  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      // Incomplete characters are not text yet.
      std::string storage;
      if (replace_invalid_utf8(token, storage).data() == token.data()) {
        token = replacement_.in(token);
      }
    }
  }

 private:
  Replacement replacement_;
};

/// Takes up to so many of one character from both ends of each token.
class StripDecoder final : public Decoder {
 public:
  StripDecoder(std::string character, std::uint32_t left, std::uint32_t right)
      : character_(std::move(character)), left_(left), right_(right) {}

  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      std::string_view rest = token;
      for (std::uint32_t i = 0; i < left_ && rest.starts_with(character_); ++i) {
        rest.remove_prefix(character_.size());
      }
      for (std::uint32_t i = 0; i < right_ && rest.ends_with(character_); ++i) {
        rest.remove_suffix(character_.size());
      }
      token = std::string(rest);
    }
  }

 private:
  std::string character_;
  std::uint32_t left_;
  std::uint32_t right_;
};

class FuseDecoder final : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::string text;
    for (const std::string& token : tokens) {
      text += token;
    }
    tokens.assign(1, text);
  }
};

std::unique_ptr<const Decoder> read_strip(const JsonField& field) {
  constexpr std::uint32_t kMaxStripped = 1000;
  field.only({"content", "start", "stop"});
  return std::make_unique<StripDecoder>(read_character(field.at("content")),
                                        field.at("start").number_below(kMaxStripped),
                                        field.at("stop").number_below(kMaxStripped));
}

std::unique_ptr<const Decoder> read_metaspace(const JsonField& field) {
  field.only({"replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  const JsonField scheme = field.at("prepend_scheme");
  const bool prepended =
      scheme.is_null() ? field.at("add_prefix_space").flag_or(true) : scheme.text() != "never";
  return std::make_unique<MetaspaceDecoder>(read_character(field.at("replacement")), prepended);
}

void add_decoder(const JsonField& field, Decoders& steps) {
  const std::string& type = field.type();
  if (type == "Sequence") {
    field.only({"decoders"});
    field.at("decoders").for_each([&](const JsonField& step) { add_decoder(step, steps); });
  } else if (type == "ByteLevel") {
    field.only({"add_prefix_space", "trim_offsets", "use_regex"});
    steps.push_back(byte_level_decoder());
  } else if (type == "ByteFallback") {
    field.only({});
    steps.push_back(std::make_unique<ByteFallbackDecoder>());
  } else if (type == "Metaspace") {
    steps.push_back(read_metaspace(field));
  } else if (type == "Replace") {
    steps.push_back(std::make_unique<ReplaceDecoder>(Replacement(field)));
  } else if (type == "Strip") {
    steps.push_back(read_strip(field));
  } else if (type == "Fuse") {
    field.only({});
    steps.push_back(std::make_unique<FuseDecoder>());
  } else {
    field.at("type").refuse();
  }
}

}  // namespace

Decoders read_decoders(const JsonField& field) {
  Decoders steps;
  if (!field.is_null()) {
    add_decoder(field, steps);
  }
  return steps;
}

std::unique_ptr<const Decoder> byte_level_decoder() {
  return std::make_unique<ByteLevelDecoder>();
}

}  // namespace tessera::data
