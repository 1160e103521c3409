#include "pipeline/normalizers.h"

#include <string_view>

#include "pipeline/replacement.h"
#include "unicode/normalization.h"
#include "unicode/properties.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

/// The Unicode normalization forms.
class UnicodeForm final : public Normalizer {
 public:
  explicit UnicodeForm(NormalizationForm form) : form_(form) {}

  void apply(std::string& text) const override {
    std::string out;
    std::string_view rest = text;
    while (!rest.empty()) {
      const std::size_t plain = plain_prefix(rest);
      out += rest.substr(0, plain);
      rest.remove_prefix(plain);
      const std::size_t others = others_prefix(rest);
      append_normalized(rest.substr(0, others), form_, out);
      rest.remove_prefix(others);
    }
    text = std::move(out);
  }

 private:
  static bool is_ascii(char byte) { return static_cast<unsigned char>(byte) < 0x80; }

  /// ASCII characters that nothing follows with which they could be composed.
  static std::size_t plain_prefix(std::string_view text) {
    std::size_t end = 0;
    while (end < text.size() && is_ascii(text[end])) {
      ++end;
    }
    return end == text.size() || end == 0 ? end : end - 1;
  }

  /// The others, with the character before them. No ASCII character is composed with the one before
  /// it.
  static std::size_t others_prefix(std::string_view text) {
    std::size_t end = text.empty() ? 0 : 1;
    while (end < text.size() && !is_ascii(text[end])) {
      ++end;
    }
    return end;
  }

  NormalizationForm form_;
};

class Prepend final : public Normalizer {
 public:
  explicit Prepend(std::string prefix) : prefix_(std::move(prefix)) {}
  void apply(std::string& text) const override {
    if (!text.empty()) {
      text.insert(0, prefix_);
    }
  }

 private:
  std::string prefix_;
};

class Replace final : public Normalizer {
 public:
  explicit Replace(Replacement replacement) : replacement_(std::move(replacement)) {}
  void apply(std::string& text) const override { text = replacement_.in(text); }

 private:
  Replacement replacement_;
};

/// Character by character.
class Lowercase final : public Normalizer {
 public:
  void apply(std::string& text) const override {
    std::string out;
    std::string_view rest = text;
    while (!rest.empty()) {
      const std::size_t bytes = first_character(rest).bytes;
      append_lower(code_point(rest.substr(0, bytes)), out);
      rest.remove_prefix(bytes);
    }
    text = std::move(out);
  }
};

/// Without white space at the ends.
class StripSpace final : public Normalizer {
 public:
  StripSpace(bool left, bool right) : left_(left), right_(right) {}
  void apply(std::string& text) const override {
    if (right_) {
      text.resize(without_trailing_space(text));
    }
    text.erase(0, left_ ? leading_space(text) : 0);
  }

 private:
  bool left_, right_;
};

void add(const JsonField& field, Normalizers& steps) {
  const std::string& type = field.type();
  const auto add_form = [&](NormalizationForm form) {
    field.only({});
    steps.push_back(std::make_unique<UnicodeForm>(form));
  };
  if (type == "Sequence") {
    field.only({"normalizers"});
    field.at("normalizers").for_each([&](const JsonField& step) { add(step, steps); });
  } else if (type == "NFC") {
    add_form({.composed = true});
  } else if (type == "NFD") {
    add_form({});
  } else if (type == "NFKC") {
    add_form({.compatible = true, .composed = true});
  } else if (type == "NFKD") {
    add_form({.compatible = true});
  } else if (type == "Prepend") {
    field.only({"prepend"});
    steps.push_back(std::make_unique<Prepend>(field.at("prepend").text()));
  } else if (type == "Lowercase") {
    field.only({});
    steps.push_back(std::make_unique<Lowercase>());
  } else if (type == "Strip") {
    field.only({"strip_left", "strip_right"});
    steps.push_back(std::make_unique<StripSpace>(field.at("strip_left").flag_or(false),
                                                 field.at("strip_right").flag_or(false)));
  } else if (type == "Replace") {
    steps.push_back(std::make_unique<Replace>(Replacement(field)));
  } else {
    field.at("type").refuse();
  }
}

}  // namespace

Normalizers read_normalizers(const JsonField& field) {
  Normalizers steps;
  if (!field.is_null()) {
    add(field, steps);
  }
  return steps;
}

}  // namespace tessera::data
