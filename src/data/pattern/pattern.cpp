#define PCRE2_CODE_UNIT_WIDTH 8
#include "pattern/pattern.h"

#include <pcre2.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

/// A pattern of a tokenizer takes a few steps for a word, and for each character of one that is the
/// whole text.
constexpr std::size_t kMinMatchLimit = 1'000'000;
constexpr std::size_t kMatchStepsOfByte = 16;
/// The interpreter's limit, in KiB.
constexpr std::uint32_t kHeapLimit = 64 * 1024;
constexpr std::size_t kMaxPatternBytes = 100'000;
/// CPU time of this thread for all matches of a text. A tokenizer's pattern needs 0.05 us a byte.
constexpr double kFreeSeconds = 1;
constexpr double kSecondsOfByte = 5e-6;
constexpr int kMatchesBetweenLooks = 64;
constexpr std::size_t kPlacesBetweenLooks = 1024;

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

std::uint32_t match_limit(std::size_t bytes) {
  return static_cast<std::uint32_t>(
      std::min<std::size_t>(std::max(kMinMatchLimit, kMatchStepsOfByte * bytes), UINT32_MAX));
}

double seconds_of_thread() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Searches one text repeatedly. A match has a limit of steps. Loops of a single character count no
/// steps, however: a pattern that reads the rest of the text at each place is found only by its
/// time.
class Search {
 public:
  /// `symbols`: of the text.
  Search(const pcre2_code* code, std::string_view symbols, const std::string& expression)
      : code_(code),
        text_(symbols),
        expression_(expression),
        context_(pcre2_match_context_create(nullptr)),
        data_(pcre2_match_data_create(1, nullptr)) {
    TESSERA_CHECK(context_ && data_, "no memory is left to match a tokenizer's pattern");
    pcre2_set_match_limit(context_.get(), match_limit(symbols.size()));
    pcre2_set_heap_limit(context_.get(), kHeapLimit);
  }

  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  /// The first match that begins at `at` or later. Searches in steps of some places and checks the
  /// time between them.
  std::optional<Range> from(std::size_t at) {
    count_search();
    while (at <= text_.size()) {
      pcre2_set_offset_limit(context_.get(), at + kPlacesBetweenLooks - 1);
      if (const auto found = within_limit(at)) {
        return found;
      }
      check_time();
      at += kPlacesBetweenLooks;
    }
    return std::nullopt;
  }

 private:
  void count_search() {
    if (++searches_ % kMatchesBetweenLooks == 0) {
      check_time();
    }
  }

  void check_time() const {
    const double limit = kFreeSeconds + kSecondsOfByte * static_cast<double>(text_.size());
    TESSERA_CHECK(seconds_of_thread() - begin_ <= limit, "the tokenizer's pattern '",
                  printable(expression_), "' needs more than ", limit, " s for a text of ",
                  text_.size(), " bytes: use a tokenizer with a simpler pattern, or shorter texts");
  }

  std::optional<Range> within_limit(std::size_t at) {
    int found = match(at, 0);
    // Compiled code has a small stack; the interpreter has a heap.
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      found = match(at, PCRE2_NO_JIT);
    }
    if (found == PCRE2_ERROR_NOMATCH) {
      return std::nullopt;
    }
    TESSERA_CHECK(found >= 0, "the tokenizer's pattern '", printable(expression_),
                  "' cannot be matched in a text of ", text_.size(), " bytes (",
                  pcre2_message(found), "): use a tokenizer with a simpler pattern");
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data_.get());
    return Range{range[0], range[1]};
  }

  int match(std::size_t at, std::uint32_t options) {
    return pcre2_match(code_, bytes_of(text_), text_.size(), at, options, data_.get(),
                       context_.get());
  }

  const pcre2_code* code_;
  std::string_view text_;
  const std::string& expression_;
  MatchContext context_;
  MatchData data_;
  double begin_ = seconds_of_thread();
  int searches_ = 0;
};

pcre2_code* compile(const std::string& expression, std::string_view translated) {
  const CompileContext context(pcre2_compile_context_create(nullptr));
  TESSERA_CHECK(context, "no memory is left to compile a tokenizer's pattern");
  // Oniguruma: only a line feed ends a line, and ^ and $ are for lines.
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE place = 0;
  pcre2_code* code =
      pcre2_compile(bytes_of(translated), translated.size(),
                    PCRE2_MULTILINE | PCRE2_USE_OFFSET_LIMIT, &error, &place, context.get());
  TESSERA_CHECK(code != nullptr, "the tokenizer's pattern '", printable(expression),
                "' is not a regular expression (", pcre2_message(error), ")");
  // Where there is no compiler for the machine the interpreter runs it.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return code;
}

/// Characters to bytes of a text, from left to right.
class Places {
 public:
  Places(std::string_view text, bool is_ascii) : text_(text), is_ascii_(is_ascii) {}

  std::size_t of(std::size_t character) {
    if (is_ascii_) {
      return character;
    }
    for (; character_ < character; ++character_) {
      ++byte_;
      while (byte_ < text_.size() && (static_cast<unsigned char>(text_[byte_]) & 0xC0U) == 0x80U) {
        ++byte_;
      }
    }
    return byte_;
  }

 private:
  std::string_view text_;
  bool is_ascii_;
  std::size_t character_ = 0;
  std::size_t byte_ = 0;
};

std::string_view checked(std::string_view expression) {
  TESSERA_CHECK(expression.size() <= kMaxPatternBytes, "a pattern of ", expression.size(),
                " bytes is longer than any tokenizer's; at most ", kMaxPatternBytes, " are read");
  return expression;
}

}  // namespace

void Pattern::Free::operator()(pcre2_real_code_8* code) const {
  pcre2_code_free(code);
}

Pattern::Pattern(std::string_view expression, ByteExpression translated)
    : expression_(expression),
      symbols_(std::move(translated.symbols)),
      code_(compile(expression_, translated.text)) {}

Pattern::Pattern(std::string_view expression)
    : Pattern(expression, translate_pattern(checked(expression))) {}

Pattern Pattern::literal(std::string_view text) {
  Pattern pattern("");  // which matches everywhere
  pattern.literal_ = checked(text);
  return pattern;
}

Pattern Pattern::one_of(const CodeSet& set, std::string_view name) {
  return Pattern(name, translate_set(set));
}

void Pattern::for_each_match(std::string_view text, OnMatch on_match) const {
  if (!literal_.empty()) {
    for (std::size_t at = text.find(literal_); at != std::string::npos;
         at = text.find(literal_, at + literal_.size())) {
      on_match(at, at + literal_.size());
    }
    return;
  }
  // A text of ASCII is its own symbols.
  const bool is_ascii = std::ranges::all_of(text, [](char c) { return (c & 0x80) == 0; });
  const std::string others = is_ascii ? "" : symbols_.of(text);
  const std::string_view symbols = is_ascii ? text : others;
  Places places(text, is_ascii);
  Search search(code_.get(), symbols, expression_);
  std::size_t at = 0;
  std::optional<std::size_t> last_end;
  while (at <= symbols.size()) {
    const auto found = search.from(at);
    if (!found) {
      return;
    }
    // An empty match where the last one ended does not count: continue behind the next character.
    if (found->begin == found->end && last_end == found->end) {
      ++at;
      continue;
    }
    const std::size_t begin = places.of(found->begin);
    on_match(begin, places.of(found->end));
    at = found->end;
    last_end = found->end;
  }
}

}  // namespace tessera::data
