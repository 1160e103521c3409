// Samples of prompts and completions, for fine-tuning.
#include "tessera/data/prompt_completions.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/detail/input_file.h"
#include "tessera/core/error.h"
#include "tessera/data/json_lines.h"

namespace tessera::data {
namespace {

/// Tokens of one object; the first `prompt` of them are not learnt.
struct PromptSample {
  std::vector<std::int64_t> tokens;
  std::size_t prompt;
};

class PromptCompletions final : public SampleSource {
 public:
  PromptCompletions(const JsonLines& lines, const Tokenizer& tokenizer, std::int64_t sequence,
                    PromptOptions options)
      : sequence_(sequence), options_(std::move(options)) {
    TESSERA_CHECK(sequence > 0, "sequence ", sequence, " must be positive");
    while (const std::optional<JsonLine> line = lines()) {
      if (!is_blank(line->text)) {
        add(line->text, tokenizer, line->origin);
      }
    }
    TESSERA_CHECK(!samples_.empty(),
                  "the data for fine-tuning hold no object; give one JSON object a line");
  }

  std::int64_t size() const override { return static_cast<std::int64_t>(samples_.size()); }
  std::int64_t sequence() const override { return sequence_; }
  bool ignores_targets() const override { return true; }

  void read(std::int64_t index, std::span<std::int64_t> inputs,
            std::span<std::int64_t> targets) const override {
    const auto number = static_cast<std::size_t>(index);
    const Place& place = samples_.at(number);
    const std::size_t end =
        number + 1 < samples_.size() ? samples_[number + 1].begin : tokens_.size();
    const auto tokens = std::span(tokens_).subspan(place.begin, end - place.begin);
    std::ranges::fill(inputs, options_.end);
    std::ranges::fill(targets, kIgnoredTarget);
    // The last token is a target only.
    std::ranges::copy(tokens.first(tokens.size() - 1), inputs.begin());
    std::ranges::copy(tokens.subspan(place.prompt),
                      targets.begin() + static_cast<std::ptrdiff_t>(place.prompt) - 1);
  }

  std::string description() const override {
    return std::to_string(size()) + " prompts with completions";
  }

 private:
  struct Place {
    std::size_t begin;   ///< in tokens_
    std::size_t prompt;  ///< tokens that are not learnt, at least 1
  };

  PromptSample encode(const Tokenizer& tokenizer, const std::string& prompt,
                      const std::string& completion) const {
    std::vector<std::int64_t> first = tokenizer.encode(prompt);
    std::vector<std::int64_t> all = tokenizer.encode(prompt + completion);
    if (all.size() < first.size() || !std::equal(first.begin(), first.end(), all.begin())) {
      all = first;
      const std::vector<std::int64_t> rest = tokenizer.encode(completion);
      all.insert(all.end(), rest.begin(), rest.end());
    }
    if (options_.begin) {
      all.insert(all.begin(), *options_.begin);
    }
    all.push_back(options_.end);
    return {std::move(all), first.size() + (options_.begin ? 1 : 0)};
  }

  /// Where a prompt would leave no room for a target, its beginning goes, up to where the whole
  /// completion has room, or up to its last token. The token that texts begin with stays.
  void cut_prompt(PromptSample& sample, std::size_t room) const {
    const std::size_t fixed = options_.begin ? 1 : 0;
    if (!options_.truncate || sample.prompt < room || room <= fixed + 1) {
      return;
    }
    const std::size_t completion = sample.tokens.size() - sample.prompt;
    const std::size_t kept = std::max(room - std::min(completion, room), fixed + 1);
    const auto begin = sample.tokens.begin() + static_cast<std::ptrdiff_t>(fixed);
    sample.tokens.erase(begin, begin + static_cast<std::ptrdiff_t>(sample.prompt - kept));
    sample.prompt = kept;
  }

  /// `origin`: file and line.
  void add(const std::string& line, const Tokenizer& tokenizer, const std::string& origin) {
    const std::vector<std::string> texts =
        json_texts(line, {options_.prompt_field, options_.completion_field}, origin);
    PromptSample sample = encode(tokenizer, texts[0], texts[1]);
    const auto room = static_cast<std::size_t>(sequence_) + 1;
    TESSERA_CHECK(options_.truncate || sample.tokens.size() <= room, origin, ": the sample has ",
                  sample.tokens.size(), " tokens, but a sequence and its last target have ", room,
                  "; take longer sequences, or cut samples");
    cut_prompt(sample, room);
    // Without anything before it a token can't be a target.
    sample.prompt = std::max<std::size_t>(sample.prompt, 1);
    TESSERA_CHECK(sample.prompt < std::min(sample.tokens.size(), room), origin, ": the prompt has ",
                  sample.prompt, " of ", sample.tokens.size(),
                  " tokens, which leaves none to learn in a sequence of ", sequence_,
                  "; take longer sequences, or leave the line out");
    sample.tokens.resize(std::min(sample.tokens.size(), room));
    samples_.push_back({tokens_.size(), sample.prompt});
    tokens_.insert(tokens_.end(), sample.tokens.begin(), sample.tokens.end());
  }

  std::int64_t sequence_;
  PromptOptions options_;
  std::vector<std::uint32_t> tokens_;  ///< of all samples, one behind the other
  std::vector<Place> samples_;
};

}  // namespace

SampleSourcePtr prompt_completions(const JsonLines& lines, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options) {
  return std::make_shared<PromptCompletions>(lines, tokenizer, sequence, options);
}

SampleSourcePtr prompt_completions(const std::string& file, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options) {
  // Opened as other input is, which refuses what is no regular file.
  const detail::InputFile input(file, "a JSON Lines file");
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
