#include "pipeline/normalizers.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "pipeline/replacement.h"
#include "pipeline/white_space.h"
#include "tokenizer/utf8.h"

namespace tessera::data {
namespace {

using CodePoints = std::vector<utf8proc_int32_t>;
/// The longest, that of U+FDFA, has 18 characters.
constexpr std::size_t kMaxDecomposition = 32;

/// 0 for what begins a character.
utf8proc_propval_t combining_class(utf8proc_int32_t code) {
  return utf8proc_get_property(code)->combining_class;
}

/// Unicode's canonical ordering: the marks behind a character by their class.
void order_marks(CodePoints& codes) {
  const auto is_mark = [](utf8proc_int32_t code) { return combining_class(code) != 0; };
  for (auto end = codes.begin(); end != codes.end();) {
    const auto begin = std::find_if(end, codes.end(), is_mark);
    end = std::find_if_not(begin, codes.end(), is_mark);
    if (end - begin > 1) {
      std::ranges::stable_sort(begin, end, {}, combining_class);
    }
  }
}

/// The Unicode normalization forms.
class UnicodeForm final : public Normalizer {
 public:
  explicit UnicodeForm(int options) : options_(static_cast<utf8proc_option_t>(options)) {}

  void apply(std::string& text) const override {
    std::string out;
    std::string_view rest = text;
    while (!rest.empty()) {
      const std::size_t plain = plain_prefix(rest);
      out += rest.substr(0, plain);
      rest.remove_prefix(plain);
      const std::size_t others = others_prefix(rest);
      append_normalized(rest.substr(0, others), out);
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

  /// utf8proc_map() would order marks in a time that grows with the square of their number.
  void append_normalized(std::string_view text, std::string& out) const {
    CodePoints codes = decomposed(text);
    order_marks(codes);
    const auto count = static_cast<utf8proc_ssize_t>(codes.size());
    codes.push_back(0);  // utf8proc writes the text in place, and a zero behind it
    const utf8proc_ssize_t bytes = utf8proc_reencode(codes.data(), count, options_);
    TESSERA_CHECK(bytes >= 0, "a text of ", text.size(),
                  " bytes cannot be normalized: ", utf8proc_errmsg(bytes));
    out.append(reinterpret_cast<const char*>(codes.data()), static_cast<std::size_t>(bytes));
  }

  CodePoints decomposed(std::string_view text) const {
    CodePoints codes;
    codes.reserve(text.size() + 1);
    while (!text.empty()) {
      const std::string_view character = text.substr(0, first_character(text).bytes);
      text.remove_prefix(character.size());
      std::array<utf8proc_int32_t, kMaxDecomposition> parts{};
      const auto count =
          utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code_point(character)),
                                  parts.data(), parts.size(), options_, nullptr);
      TESSERA_CHECK(count >= 0 && count <= std::ssize(parts), "the character '",
                    printable(character), "' cannot be normalized");
      codes.insert(codes.end(), parts.begin(), parts.begin() + count);
    }
    return codes;
  }

  utf8proc_option_t options_;
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
      const std::string_view character = rest.substr(0, first_character(rest).bytes);
      append_lower(static_cast<utf8proc_int32_t>(code_point(character)), out);
      rest.remove_prefix(character.size());
    }
    text = std::move(out);
  }

 private:
  static void append_lower(utf8proc_int32_t code, std::string& out) {
    constexpr utf8proc_int32_t kDottedI = 0x130;  // the only one that becomes two characters
    std::array<utf8proc_uint8_t, 4> bytes{};
    const utf8proc_ssize_t count =
        utf8proc_encode_char(code == kDottedI ? 'i' : utf8proc_tolower(code), bytes.data());
    out.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(count));
    out += code == kDottedI ? "\u0307" : "";
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
  const auto form = [&](int options) {
    field.only({});
    steps.push_back(std::make_unique<UnicodeForm>(UTF8PROC_STABLE | options));
  };
  if (type == "Sequence") {
    field.only({"normalizers"});
    field.at("normalizers").for_each([&](const JsonField& step) { add(step, steps); });
  } else if (type == "NFC") {
    form(UTF8PROC_COMPOSE);
  } else if (type == "NFD") {
    form(UTF8PROC_DECOMPOSE);
  } else if (type == "NFKC") {
    form(UTF8PROC_COMPOSE | UTF8PROC_COMPAT);
  } else if (type == "NFKD") {
    form(UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
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
