// Samples of prompts and completions, for fine-tuning.
#include "tessera/data/prompt_completions.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/input_file.h"
#include "tessera/data/json_lines.h"

namespace tessera::data {
namespace {

/// Tokens of one object, and which of them are learnt.
struct Sample {
  std::vector<std::int64_t> tokens;
  std::vector<bool> learnt;
};

/// How many tokens begin both.
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
    // The last token is a target only.
    for (std::size_t i = 0; begin + i + 1 < end; ++i) {
      inputs[i] = tokens_[begin + i];
      targets[i] = learnt_[begin + i + 1] ? tokens_[begin + i + 1] : kIgnoredTarget;
    }
  }

  std::string description() const override {
    return std::to_string(size()) + " prompts with completions";
  }

 private:
  /// `learnt` from `prompt` on.
  static Sample sample_of(std::vector<std::int64_t> tokens, std::size_t prompt) {
    std::vector<bool> learnt(tokens.size(), true);
    std::fill_n(learnt.begin(), std::min(prompt, learnt.size()), false);
    return {std::move(tokens), std::move(learnt)};
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

  /// Where a prompt would leave no room for a target, its beginning is cut: until the whole
  /// completion has room, or down to its last token. The tokens that texts begin with stay.
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

  Sample encode_chat(const Tokenizer& tokenizer, const std::string& line,
                     const std::string& origin) const {
    TESSERA_CHECK(
        options_.chat, origin,
        ": the line has messages, but there is no chat template beside the tokenizer; take "
        "the tokenizer of a model that has one, or lines with a prompt and a completion");
    const ChatText chat = options_.chat->conversation(line, origin);
    Sample sample;
    sample.tokens = tokenizer.encode(chat.text);
    sample.learnt.resize(sample.tokens.size());
    const auto place_of = [&](std::size_t byte) {
      return common_tokens(tokenizer.encode(std::string_view(chat.text).substr(0, byte)),
                           sample.tokens);
    };
    for (const auto& [begin, end] : chat.learnt) {
      const std::size_t first = place_of(begin);
      const std::size_t last = place_of(end);
      for (std::size_t i = first; i < last; ++i) {
        sample.learnt[i] = true;
      }
    }
    return sample;
  }

  /// `origin`: file and line.
  void add(const std::string& line, const Tokenizer& tokenizer, const std::string& origin) {
    const auto room = static_cast<std::size_t>(sequence_) + 1;
    Sample sample;
    if (has_messages(line)) {
      sample = encode_chat(tokenizer, line, origin);
    } else {
      const std::vector<std::string> texts =
          json_texts(line, {options_.prompt_field, options_.completion_field}, origin);
      sample = encode(tokenizer, texts[0], texts[1], room);
    }
    const std::size_t size = sample.tokens.size();
    TESSERA_CHECK(options_.truncate || size <= room, origin, ": the sample has ", size,
                  " tokens, but a sequence and its last target have ", room,
                  "; take longer sequences, or cut samples");
    // Without anything before it a token can't be a target.
    if (!sample.learnt.empty()) {
      sample.learnt[0] = false;
    }
    const auto first = std::find(sample.learnt.begin(), sample.learnt.end(), true);
    const auto prompt = static_cast<std::size_t>(first - sample.learnt.begin());
    TESSERA_CHECK(prompt < std::min(size, room), origin, ": the prompt has ", prompt, " of ", size,
                  " tokens, which leaves none to learn in a sequence of ", sequence_,
                  "; take longer sequences, or leave the line out");
    sample.tokens.resize(std::min(size, room));
    sample.learnt.resize(sample.tokens.size());
    begins_.push_back(tokens_.size());
    tokens_.insert(tokens_.end(), sample.tokens.begin(), sample.tokens.end());
    learnt_.insert(learnt_.end(), sample.learnt.begin(), sample.learnt.end());
  }

  std::int64_t sequence_;
  PromptOptions options_;
  std::vector<std::uint32_t> tokens_;  ///< of all samples, one behind the other
  std::vector<bool> learnt_;           ///< which of these are targets
  std::vector<std::size_t> begins_;    ///< where each sample begins in tokens_
};

}  // namespace

SampleSourcePtr prompt_completions(const JsonLines& lines, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options) {
  return std::make_shared<PromptCompletions>(lines, tokenizer, sequence, options);
}

SampleSourcePtr prompt_completions(const std::string& file, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options) {
  // Opened as other input is, which refuses what is no regular file.
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
