#include "pipeline/pre_tokenizers.h"

#include <string>

#include "pattern/pattern.h"
#include "pipeline/byte_alphabet.h"
#include "pipeline/replacement.h"
#include "pipeline/split_behavior.h"
#include "unicode/properties.h"

namespace tessera::data {
namespace {

/// GPT-2's, which stands for "use_regex".
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class SplitByPattern final : public PreTokenizer {
 public:
  SplitByPattern(Pattern pattern, SplitBehavior behavior, bool invert)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}

  void split(Piece piece, OnPiece on_piece) const override {
    const std::string_view text = piece.text;
    const auto give = [&](std::size_t begin, std::size_t end) {
      if (begin < end) {
        on_piece({text.substr(begin, end - begin), piece.first && begin == 0});
      }
    };
    BehaviorSplitter splitter(behavior_, give);
    std::size_t end_of_last = 0;
    pattern_.for_each_match(text, [&](std::size_t begin, std::size_t end) {
      if (end_of_last < begin) {
        splitter.add(end_of_last, begin, invert_);
      }
      splitter.add(begin, end, !invert_);
      end_of_last = end;
    });
    if (end_of_last < text.size()) {
      splitter.add(end_of_last, text.size(), invert_);
    }
    splitter.finish();
  }

 private:
  Pattern pattern_;
  SplitBehavior behavior_;
  bool invert_;
};

/// ByteLevel's option; its mapping of bytes to characters is undone in the vocabulary instead, but
/// for steps behind it.
class AddPrefixSpace final : public PreTokenizer {
 public:
  void split(Piece piece, OnPiece on_piece) const override {
    if (piece.text.starts_with(' ')) {
      on_piece(piece);
      return;
    }
    std::string text(" ");
    text += piece.text;
    on_piece({text, piece.first});
  }
};

/// A step behind ByteLevel, which splits the characters that stand for bytes and makes no others.
class OnByteAlphabet final : public PreTokenizer {
 public:
  explicit OnByteAlphabet(std::unique_ptr<const PreTokenizer> step) : step_(std::move(step)) {}

  void split(Piece piece, OnPiece on_piece) const override {
    const std::string characters = token_of_bytes(piece.text);
    step_->split({characters, piece.first}, [&](Piece part) {
      const std::string bytes = bytes_of_token(part.text).value();
      on_piece({bytes, part.first});
    });
  }

 private:
  std::unique_ptr<const PreTokenizer> step_;
};

/// SentencePiece's handling of spaces.
class Metaspace final : public PreTokenizer {
 public:
  enum class Prepend { kAlways, kFirst, kNever };

  Metaspace(std::string mark, Prepend prepend, bool split)
      : mark_(std::move(mark)), prepend_(prepend), split_(split), words_(Pattern::literal(mark_)) {}

  void split(Piece piece, OnPiece on_piece) const override {
    std::string text;
    for (const char c : piece.text) {
      if (c == ' ') {
        text += mark_;
      } else {
        text.push_back(c);
      }
    }
    const bool wanted =
        prepend_ == Prepend::kAlways || (prepend_ == Prepend::kFirst && piece.first);
    if (wanted && !text.starts_with(mark_)) {
      text.insert(0, mark_);
    }
    if (split_) {
      split_words(text, piece.first, on_piece);
    } else {
      on_piece({text, piece.first});
    }
  }

 private:
  /// Before each mark.
  void split_words(std::string_view text, bool first, OnPiece on_piece) const {
    std::size_t begin = 0;
    const auto give = [&](std::size_t end) {
      if (begin < end) {
        on_piece({text.substr(begin, end - begin), first && begin == 0});
      }
      begin = end;
    };
    words_.for_each_match(text, [&](std::size_t mark, std::size_t) { give(mark); });
    give(text.size());
  }

  std::string mark_;
  Prepend prepend_;
  bool split_;
  Pattern words_;
};

void add_split(Pattern pattern, SplitBehavior behavior, bool invert, PreTokenizers& all) {
  std::unique_ptr<const PreTokenizer> step =
      std::make_unique<SplitByPattern>(std::move(pattern), behavior, invert);
  if (all.byte_level) {
    step = std::make_unique<OnByteAlphabet>(std::move(step));
  }
  all.steps.push_back(std::move(step));
}

void add_metaspace(const JsonField& field, PreTokenizers& all) {
  field.require(!all.byte_level, "before ByteLevel");
  field.only({"replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  const JsonField scheme = field.at("prepend_scheme");
  const std::string name = scheme.is_null() ? "always" : scheme.text();
  Metaspace::Prepend prepend = Metaspace::Prepend::kAlways;
  if (name == "first") {
    prepend = Metaspace::Prepend::kFirst;
  } else if (name == "never") {
    prepend = Metaspace::Prepend::kNever;
  } else if (name != "always") {
    scheme.refuse();
  }
  // The older name of the same.
  const JsonField older = field.at("add_prefix_space");
  if (!older.flag_or(true) && prepend != Metaspace::Prepend::kNever) {
    scheme.is_null() ? void(prepend = Metaspace::Prepend::kNever) : older.refuse();
  }
  all.steps.push_back(std::make_unique<Metaspace>(read_character(field.at("replacement")), prepend,
                                                  field.at("split").flag_or(true)));
}

void add_byte_level(const JsonField& field, PreTokenizers& all) {
  field.require(!all.byte_level, "the only ByteLevel");
  field.only({"add_prefix_space", "trim_offsets", "use_regex"});
  if (field.at("add_prefix_space").flag_or(true)) {
    all.steps.push_back(std::make_unique<AddPrefixSpace>());
  }
  if (field.at("use_regex").flag_or(true)) {
    all.steps.push_back(split_by_pattern(kGpt2Pattern));
  }
  all.byte_level = true;
}

void add_pre_tokenizer(const JsonField& field, PreTokenizers& all) {
  const std::string& type = field.type();
  if (type == "Sequence") {
    field.only({"pretokenizers"});
    field.at("pretokenizers").for_each([&](const JsonField& step) {
      add_pre_tokenizer(step, all);
    });
  } else if (type == "Split") {
    field.only({"pattern", "behavior", "invert"});
    add_split(read_pattern(field.at("pattern")), read_split_behavior(field.at("behavior")),
              field.at("invert").flag_or(false), all);
  } else if (type == "Punctuation") {
    field.only({"behavior"});
    const JsonField behavior = field.at("behavior");
    add_split(Pattern::one_of(unicode_codes(CodeKind::kPunctuationStep), "Punctuation"),
              behavior.is_null() ? SplitBehavior::kIsolated : read_split_behavior(behavior), false,
              all);
  } else if (type == "ByteLevel") {
    add_byte_level(field, all);
  } else if (type == "Metaspace") {
    add_metaspace(field, all);
  } else if (type == "Digits") {
    field.only({"individual_digits"});
    const bool each = field.at("individual_digits").flag_or(false);
    add_split(Pattern::one_of(unicode_codes(CodeKind::kDigitsStep), "Digits"),
              each ? SplitBehavior::kIsolated : SplitBehavior::kContiguous, false, all);
  } else {
    field.at("type").refuse();
  }
}

}  // namespace

void PreTokenizers::split_from(std::size_t step, Piece piece, OnPiece on_piece) const {
  if (step == steps.size()) {
    on_piece(piece);
    return;
  }
  // NOLINTNEXTLINE(misc-no-recursion): as deep as there are steps.
  steps[step]->split(piece, [&](Piece part) { split_from(step + 1, part, on_piece); });
}

PreTokenizers read_pre_tokenizers(const JsonField& field) {
  PreTokenizers all;
  if (!field.is_null()) {
    add_pre_tokenizer(field, all);
  }
  return all;
}

std::unique_ptr<const PreTokenizer> split_by_pattern(std::string_view expression) {
  return std::make_unique<SplitByPattern>(Pattern(expression), SplitBehavior::kIsolated, false);
}

}  // namespace tessera::data
