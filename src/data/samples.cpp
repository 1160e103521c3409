#include "tessera/data/samples.h"
#include "ignored_target.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/text.h"

namespace tessera::data {
namespace {

/// The number of tokens that are checked before the first step, which takes less than a second.
/// Later tokens are checked when they are read.
constexpr std::int64_t kCheckedAtStart = std::int64_t{1} << 26;
/// The number of tokens that are read and checked at once, small enough for the CPU's cache.
constexpr std::int64_t kCheckedAtOnce = std::int64_t{1} << 16;

class TokenWindows final : public SampleSource {
 public:
  TokenWindows(TokenSourcePtr tokens, std::int64_t sequence, std::int64_t vocabulary)
      : tokens_(std::move(tokens)), sequence_(sequence), vocabulary_(vocabulary) {
    TESSERA_CHECK(sequence > 0 && vocabulary > 0, "sequence ", sequence, " and vocabulary ",
                  vocabulary, " must be positive");
    check_start();
  }

  // The last token is not an input, because it is only a target: the last target of a sample is the
  // first input of the next sample.
  std::int64_t size() const override {
    return std::max<std::int64_t>(tokens_->size() - 1, 0) / sequence_;
  }

  std::int64_t sequence() const override { return sequence_; }

  void read(std::int64_t index, std::span<std::int64_t> inputs,
            std::span<std::int64_t> targets) const override {
    std::vector<std::int64_t> sample(static_cast<std::size_t>(sequence_) + 1);
    const std::int64_t begin = index * sequence_;
    tokens_->read(begin, sample);
    check_vocabulary(begin, sample);
    std::copy(sample.begin(), sample.end() - 1, inputs.begin());
    std::copy(sample.begin() + 1, sample.end(), targets.begin());
  }

  std::string description() const override {
    return std::to_string(tokens_->size()) + " tokens, which is " + std::to_string(size()) +
           (size() == 1 ? " sample of " : " samples of ") + std::to_string(sequence_) + " tokens";
  }

 private:
  /// Checks the first tokens at construction, which detects most mismatched tokenizers before the
  /// first step.
  void check_start() const {
    const std::int64_t end = std::min(tokens_->size(), kCheckedAtStart);
    std::vector<std::int64_t> piece;
    for (std::int64_t begin = 0; begin < end; begin += kCheckedAtOnce) {
      piece.resize(static_cast<std::size_t>(std::min(kCheckedAtOnce, end - begin)));
      tokens_->read(begin, piece);
      check_vocabulary(begin, piece);
    }
  }

  /// Throws Error for a token outside the vocabulary, because an index outside the embedding would
  /// crash on a GPU far from the cause. `begin`: position of the first token, for the message.
  void check_vocabulary(std::int64_t begin, std::span<const std::int64_t> tokens) const {
    const auto outside = [this](std::int64_t token) { return token < 0 || token >= vocabulary_; };
    const auto bad = std::find_if(tokens.begin(), tokens.end(), outside);
    TESSERA_CHECK(bad == tokens.end(), "token ", *bad, " at position ",
                  begin + (bad - tokens.begin()), " of the data is outside the vocabulary of ",
                  vocabulary_, ": use the tokenizer that this model was made for");
  }

  TokenSourcePtr tokens_;
  std::int64_t sequence_, vocabulary_;
};

}  // namespace

SampleSourcePtr token_windows(TokenSourcePtr tokens, std::int64_t sequence,
                              std::int64_t vocabulary) {
  return std::make_shared<TokenWindows>(std::move(tokens), sequence, vocabulary);
}

namespace {

struct Sample {
  std::vector<std::int64_t> tokens;
  std::vector<bool> learned;
};

/// The number of tokens in the common prefix of two lists.
std::size_t common_tokens(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  return static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

class PromptCompletions final : public SampleSource {
 public:
  PromptCompletions(const JsonLines& lines, const Tokenizer& tokenizer, std::int64_t sequence,
                    PromptOptions options)
      : sequence_(sequence), options_(std::move(options)) {
    TESSERA_CHECK(sequence > 0, "sequence ", sequence, " must be positive");
    TESSERA_CHECK(!options_.end.empty(),
                  "PromptOptions::end is empty; name a token that ends completions");
    while (const std::optional<JsonLine> line = lines()) {
      if (!is_blank(line->text)) {
        add(line->text, tokenizer, line->origin);
      }
    }
    TESSERA_CHECK(!begins_.empty(),
                  "the data for fine-tuning hold no object; give one JSON object a line");
  }

  std::int64_t size() const override { return static_cast<std::int64_t>(begins_.size()); }
  std::int64_t sequence() const override { return sequence_; }
  bool ignores_targets() const override { return true; }

  void read(std::int64_t index, std::span<std::int64_t> inputs,
            std::span<std::int64_t> targets) const override {
    const auto number = static_cast<std::size_t>(index);
    const std::size_t begin = begins_.at(number);
    const std::size_t end = number + 1 < begins_.size() ? begins_[number + 1] : tokens_.size();
    std::ranges::fill(inputs, options_.end.back());
    std::ranges::fill(targets, kIgnoredTarget);
    // The last token of a sample is only a target, not an input.
    for (std::size_t i = 0; begin + i + 1 < end; ++i) {
      inputs[i] = tokens_[begin + i];
      targets[i] = learned_[begin + i + 1] ? tokens_[begin + i + 1] : kIgnoredTarget;
    }
  }

  std::string description() const override {
    return std::to_string(size()) + " prompts with completions";
  }

 private:
  /// A sample whose targets begin at token `prompt`.
  static Sample sample_of(std::vector<std::int64_t> tokens, std::size_t prompt) {
    std::vector<bool> learned(tokens.size(), true);
    std::fill_n(learned.begin(), std::min(prompt, learned.size()), false);
    return {std::move(tokens), std::move(learned)};
  }

  Sample encode(const Tokenizer& tokenizer, const std::string& prompt,
                const std::string& completion, std::size_t room) const {
    std::vector<std::int64_t> first = tokenizer.encode(prompt);
    std::vector<std::int64_t> all = tokenizer.encode(prompt + completion);
    if (common_tokens(first, all) < first.size()) {
      all = first;
      const std::vector<std::int64_t> rest = tokenizer.encode(completion);
      all.insert(all.end(), rest.begin(), rest.end());
    }
    all.insert(all.begin(), options_.begin.begin(), options_.begin.end());
    all.insert(all.end(), options_.end.begin(), options_.end.end());
    std::size_t length = options_.begin.size() + first.size();
    cut_prompt(all, length, room);
    return sample_of(std::move(all), length);
  }

  /// Cuts the beginning of a prompt that leaves no room for a target, until the whole completion
  /// fits or one token of the prompt remains. The begin tokens are not cut.
  void cut_prompt(std::vector<std::int64_t>& tokens, std::size_t& prompt, std::size_t room) const {
    const std::size_t fixed = options_.begin.size();
    if (!options_.truncate || prompt < room || room <= fixed + 1) {
      return;
    }
    const std::size_t completion = tokens.size() - prompt;
    const std::size_t kept = std::max(room - std::min(completion, room), fixed + 1);
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(fixed);
    tokens.erase(begin, begin + static_cast<std::ptrdiff_t>(prompt - kept));
    prompt = kept;
  }

  Sample encode_conversation(const Tokenizer& tokenizer, const std::vector<std::string>& prompts,
                             const std::vector<std::string>& completions) const {
    std::string text;
    // The byte ranges of the completions in `text`.
    std::vector<std::pair<std::size_t, std::size_t>> learned;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      text += prompts[i];
      learned.emplace_back(text.size(), text.size() + completions[i].size());
      text += completions[i];
    }
    Sample sample{tokenizer.encode(text), {}};
    sample.learned.resize(sample.tokens.size());
    const auto token_at = [&](std::size_t byte) {
      return common_tokens(tokenizer.encode(std::string_view(text).substr(0, byte)), sample.tokens);
    };
    for (const auto& [begin, end] : learned) {
      const std::size_t last = token_at(end);
      for (std::size_t i = token_at(begin); i < last; ++i) {
        sample.learned[i] = true;
      }
    }
    return sample;
  }

  /// Adds the sample of a line. `origin`: the file and line number, for messages.
  void add(const std::string& line, const Tokenizer& tokenizer, const std::string& origin) {
    const auto room = static_cast<std::size_t>(sequence_) + 1;
    const std::vector<JsonTexts> fields =
        json_text_lists(line, {options_.prompt_field, options_.completion_field}, origin);
    const JsonTexts& prompt = fields[0];
    const JsonTexts& completion = fields[1];
    TESSERA_CHECK(
        prompt.is_list == completion.is_list && prompt.texts.size() == completion.texts.size(),
        origin, ": the prompt has ", prompt.texts.size(), " texts and the completion ",
        completion.texts.size(), "; give two texts, or two lists of equal length");
    Sample sample = prompt.is_list
                        ? encode_conversation(tokenizer, prompt.texts, completion.texts)
                        : encode(tokenizer, prompt.texts.front(), completion.texts.front(), room);
    const std::size_t size = sample.tokens.size();
    TESSERA_CHECK(options_.truncate || size <= room, origin, ": the sample has ", size,
                  " tokens, but a sequence and its last target have ", room,
                  "; take longer sequences, or cut samples");
    // The first token is never a target.
    if (!sample.learned.empty()) {
      sample.learned[0] = false;
    }
    const auto first = std::find(sample.learned.begin(), sample.learned.end(), true);
    const auto before = static_cast<std::size_t>(first - sample.learned.begin());
    TESSERA_CHECK(before < std::min(size, room), origin, ": the prompt has ", before, " of ", size,
                  " tokens, which leaves none to learn in a sequence of ", sequence_,
                  "; take longer sequences, or leave the line out");
    sample.tokens.resize(std::min(size, room));
    sample.learned.resize(sample.tokens.size());
    begins_.push_back(tokens_.size());
    tokens_.insert(tokens_.end(), sample.tokens.begin(), sample.tokens.end());
    learned_.insert(learned_.end(), sample.learned.begin(), sample.learned.end());
  }

  std::int64_t sequence_;
  PromptOptions options_;
  std::vector<std::uint32_t> tokens_;  ///< tokens of all samples, concatenated
  std::vector<bool> learned_;          ///< whether each token in tokens_ is a target
  std::vector<std::size_t> begins_;    ///< where each sample begins in tokens_
};

}  // namespace

SampleSourcePtr prompt_completions(const JsonLines& lines, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options) {
  return std::make_shared<PromptCompletions>(lines, tokenizer, sequence, options);
}

SampleSourcePtr prompt_completions(const std::string& file, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options) {
  // InputFile throws Error for anything but a regular file.
  const files::InputFile input(file, "a JSON Lines file");
  std::ifstream in(file, std::ios::binary);
  std::int64_t number = 0;
  const JsonLines lines = [&]() -> std::optional<JsonLine> {
    JsonLine line;
    if (std::getline(in, line.text)) {
      line.origin = file + ":" + std::to_string(++number);
      return line;
    }
    TESSERA_CHECK(in.eof(), "reading '", file, "' failed: check the disk");
    return std::nullopt;
  };
  return prompt_completions(lines, tokenizer, sequence, options);
}

}  // namespace tessera::data
