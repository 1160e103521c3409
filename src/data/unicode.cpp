#define PCRE2_CODE_UNIT_WIDTH 8
#include "unicode.h"

#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

/// Sets `code` to the code point of the first character of `text`, and returns the character's size
/// in bytes; a negative number if the character is invalid.
utf8proc_ssize_t iterate(std::string_view text, utf8proc_int32_t& code) {
  return utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), std::ssize(text),
                          &code);
}

/// Whether `text` is the beginning of a valid UTF-8 character: tries to complete `text` with the
/// smallest continuation byte and with the largest.
bool begins_character(std::string_view text) {
  return std::ranges::any_of(std::array{'\x80', '\xbf'}, [&](char continuation) {
    utf8proc_int32_t code = 0;
    const std::string completed = std::string(text) + std::string(3, continuation);
    return iterate(completed, code) > std::ssize(text);
  });
}

std::size_t valid_prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Step step = first_character(text.substr(at));
    if (!step.valid) {
      break;
    }
    at += step.bytes;
  }
  return at;
}

}  // namespace

Utf8Step first_character(std::string_view text) {
  utf8proc_int32_t code = 0;
  if (const utf8proc_ssize_t size = iterate(text, code); size > 0) {
    return {.bytes = static_cast<std::size_t>(size), .valid = true};
  }
  for (std::size_t bytes = std::min<std::size_t>(3, text.size()); bytes > 0; --bytes) {
    if (begins_character(text.substr(0, bytes))) {
      return {.bytes = bytes, .cut = bytes == text.size()};
    }
  }
  return {.bytes = 1};
}

char32_t code_point(std::string_view character) {
  utf8proc_int32_t code = 0;
  iterate(character, code);
  return static_cast<char32_t>(code);
}

std::string_view last_character(std::string_view text) {
  std::size_t begin = text.size() - 1;
  while ((static_cast<unsigned char>(text[begin]) & 0xc0U) == 0x80U) {
    --begin;
  }
  return text.substr(begin);
}

std::string_view replace_invalid_utf8(std::string_view text, std::string& storage) {
  std::size_t valid = valid_prefix(text);
  if (valid == text.size()) {
    return text;
  }
  storage.clear();
  while (!text.empty()) {
    storage += text.substr(0, valid);
    text.remove_prefix(valid);
    if (!text.empty()) {
      storage += kReplacementCharacter;
      text.remove_prefix(first_character(text).bytes);
    }
    valid = valid_prefix(text);
  }
  return storage;
}

std::size_t incomplete_suffix(std::string_view text) {
  // An incomplete UTF-8 character has at most three bytes.
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const Utf8Step step = first_character(text.substr(text.size() - back));
    if (step.cut && step.bytes == back) {
      return back;
    }
  }
  return 0;
}

std::string printable(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      out.push_back(c);
    } else {
      out += {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
    }
  }
  return out;
}

std::string to_nfc(std::string_view text) {
  if (std::ranges::none_of(text, [](char byte) { return (byte & 0x80) != 0; })) {
    return std::string(text);
  }
  utf8proc_uint8_t* bytes = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), std::ssize(text), &bytes,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(bytes, std::free);
  TESSERA_CHECK(size >= 0, "cannot normalize a text of ", text.size(),
                " bytes: ", utf8proc_errmsg(size));
  return {reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(size)};
}

namespace {

/// The limit on match steps of PCRE2 in one search: kMinMatchLimit, or more in proportion to a long
/// text, because a pattern can match the whole text as one word.
constexpr std::size_t kMinMatchLimit = 1'000'000;
constexpr std::size_t kMatchStepsOfByte = 16;
/// The maximum size of the heap of PCRE2's interpreter, in KiB.
constexpr std::uint32_t kHeapLimit = 64 * 1024;
constexpr std::size_t kMaxPatternBytes = 100'000;

/// The elements of the character class \s in Oniguruma. PCRE2's own \s also contains U+180E.
constexpr std::string_view kSpace =
    R"(\x09-\x0d\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kNoSpace = R"(\S\x{180e})";

constexpr std::array<std::string_view, 7> kGroups{"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:"};

template <class T, void (*release)(T*)>
struct Release {
  void operator()(T* object) const { release(object); }
};
using CompileContext = std::unique_ptr<pcre2_compile_context,
                                       Release<pcre2_compile_context, pcre2_compile_context_free>>;
using MatchContext =
    std::unique_ptr<pcre2_match_context, Release<pcre2_match_context, pcre2_match_context_free>>;
using MatchData =
    std::unique_ptr<pcre2_match_data, Release<pcre2_match_data, pcre2_match_data_free>>;

PCRE2_SPTR bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

/// Translates an expression of Oniguruma to PCRE2. Throws Error if a construct can differ in PCRE2.
class Translation {
 public:
  explicit Translation(std::string_view expression) : whole_(expression), rest_(expression) {}

  std::string run() {
    while (!rest_.empty()) {
      switch (rest_[0]) {
        case '\\':
          escape();
          break;
        case '[':
          copy_class();
          break;
        case '(':
          group();
          break;
        case '{':
          interval();
          break;
        default:
          copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  void refuse_if(bool condition, std::string_view construct) const {
    TESSERA_CHECK(!condition, "the tokenizer's pattern '", printable(whole_), "' has '",
                  printable(construct), "', which is not implemented; use another tokenizer");
  }

  void copy(std::size_t bytes) { out_ += take(bytes); }

  std::string_view take(std::size_t bytes) {
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(taken.size());
    return taken;
  }

  void group() {
    if (rest_.starts_with("(?")) {
      refuse_if(std::ranges::none_of(kGroups,
                                     [&](auto kind) { return rest_.substr(1).starts_with(kind); }),
                rest_.substr(0, 3));
    }
    refuse_if(rest_.starts_with("(*"), "(*");
    copy(1);
    copy(rest_.starts_with('?') ? 1 : 0);
  }

  /// Copies a "{", which is a literal or begins an interval such as {2,3}. Throws Error for {n,m}+,
  /// {n}? and {,m}, which PCRE2 and Oniguruma interpret differently.
  void interval() {
    refuse_if(rest_.starts_with("{,"), "{,}");
    const std::size_t end = rest_.find_first_not_of("0123456789,", 1);
    if (rest_.substr(std::min(end, rest_.size())).starts_with('}')) {
      const char next = end + 1 < rest_.size() ? rest_[end + 1] : ' ';
      refuse_if(next == '+' || next == '?', std::string("{}") + next);
    }
    copy(1);
  }

  void escape() {
    const std::string elements = take_elements();
    out_ += last_is_set_ ? "[" + elements + "]" : elements;
  }

  /// Reads an escape such as \s, and returns the escape as elements of a character class.
  std::string take_elements() {
    const std::string_view kind = rest_.substr(0, 2);
    last_is_set_ = true;
    if (kind == "\\s" || kind == "\\S") {
      take(2);
      return std::string(kind == "\\s" ? kSpace : kNoSpace);
    }
    if (kind == "\\p" || kind == "\\P") {
      return take_category();
    }
    last_is_set_ = false;
    refuse_if(kind.size() < 2 || (std::isalnum(static_cast<unsigned char>(kind[1])) &&
                                  std::string_view("nrtf").find(kind[1]) == std::string::npos),
              kind);
    return std::string(take(1 + first_character(rest_.substr(1)).bytes));
  }

  /// Reads a general category such as \p{Lu}. Throws Error for other properties,
  /// because PCRE2 can define them differently.
  std::string take_category() {
    const std::size_t end = rest_.find('}');
    const std::string_view name = rest_.substr(0, end).substr(2);
    refuse_if(
        end == std::string_view::npos || !name.starts_with('{') || name.size() > 3 ||
            !std::ranges::all_of(name.substr(1), [](unsigned char c) { return std::isalpha(c); }),
        rest_.substr(0, end == std::string_view::npos ? 2 : end + 1));
    return std::string(take(end + 1));
  }

  void copy_class() {
    copy(rest_.starts_with("[^") ? 2 : 1);
    refuse_if(rest_.starts_with(']'), "[]");
    bool ends_item = true;  // whether "-" is a literal here: first, and after \s
    while (!rest_.starts_with(']')) {
      TESSERA_CHECK(!rest_.empty(), "the tokenizer's pattern '", printable(whole_),
                    "' is not a regular expression (a character class has no ])");
      refuse_if(rest_.starts_with('['), "[..[");
      refuse_if(rest_.starts_with("&&"), "&&");
      const char next = rest_[0];
      if (next == '-' && (ends_item || rest_.substr(1).starts_with(']'))) {
        take(1);
        out_ += "\\-";
        ends_item = false;
      } else if (next == '\\') {
        out_ += take_elements();
        ends_item = last_is_set_;
      } else {
        copy(first_character(rest_).bytes);
        ends_item = false;
      }
    }
    copy(1);
  }

  std::string_view whole_;
  std::string_view rest_;
  std::string out_;
  bool last_is_set_ = false;  ///< whether the last escape matches a set of characters (\s)
};

/// Returns the first index >= `at` at which a character of `text` begins.
std::size_t character_at(std::string_view text, std::size_t at) {
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0U) == 0x80U) {
    ++at;
  }
  return at;
}

pcre2_code* compile(std::string_view expression) {
  TESSERA_CHECK(expression.size() <= kMaxPatternBytes, "the tokenizer's pattern has ",
                expression.size(), " bytes, but the limit is ", kMaxPatternBytes, " bytes");
  const std::string translated = Translation(expression).run();
  const CompileContext context(pcre2_compile_context_create(nullptr));
  TESSERA_CHECK(context, "memory ran out while a tokenizer's pattern was compiled");
  // As in Oniguruma, only a line feed ends a line, and ^ and $ match at the beginning and end of
  // each line.
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE place = 0;
  pcre2_code* code =
      pcre2_compile(bytes_of(translated), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &place, context.get());
  TESSERA_CHECK(code != nullptr, "the tokenizer's pattern '", printable(expression),
                "' is not a regular expression (", pcre2_message(error), ")");
  // If JIT compilation is not available on this machine, the interpreter runs the pattern.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return code;
}

}  // namespace

void Pattern::Free::operator()(pcre2_real_code_8* code) const {
  pcre2_code_free(code);
}

Pattern::Pattern(std::string_view expression)
    : expression_(expression), code_(compile(expression)) {}

void Pattern::for_each_match(std::string_view text, OnMatch on_match) const {
  const MatchContext context(pcre2_match_context_create(nullptr));
  const MatchData data(pcre2_match_data_create(1, nullptr));
  TESSERA_CHECK(context && data, "memory ran out while a tokenizer's pattern was matched");
  pcre2_set_match_limit(
      context.get(), static_cast<std::uint32_t>(std::min<std::size_t>(
                         std::max(kMinMatchLimit, kMatchStepsOfByte * text.size()), UINT32_MAX)));
  pcre2_set_heap_limit(context.get(), kHeapLimit);
  const auto match = [&](std::size_t at, std::uint32_t options) {
    return pcre2_match(code_.get(), bytes_of(text), text.size(), at, PCRE2_NO_UTF_CHECK | options,
                       data.get(), context.get());
  };
  std::size_t last_end = std::string_view::npos;
  for (std::size_t at = 0; at <= text.size();) {
    int found = match(at, 0);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      // The JIT stack was too small. PCRE2's interpreter, which uses the heap, repeats the search.
      found = match(at, PCRE2_NO_JIT);
    }
    if (found == PCRE2_ERROR_NOMATCH) {
      return;
    }
    TESSERA_CHECK(found >= 0, "the tokenizer's pattern '", printable(expression_),
                  "' cannot be matched in a text of ", text.size(), " bytes (",
                  pcre2_message(found), "); use a tokenizer with a simpler pattern");
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
    // Skips an empty match directly after the previous match.
    if (range[0] == range[1] && last_end == range[1]) {
      at = character_at(text, range[1] + 1);
      continue;
    }
    on_match(range[0], range[1]);
    last_end = at = range[1];
  }
}

}  // namespace tessera::data
