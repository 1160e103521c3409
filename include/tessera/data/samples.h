#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/token_shards.h"
#include "tessera/data/tokenizer.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// A target that does not count: cross_entropy's ignore_index.
inline constexpr std::int64_t kIgnoredTarget = -100;

/// Training data: numbered samples of S = sequence() tokens. Immutable, so threads may share it.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  /// The number of samples.
  virtual std::int64_t size() const = 0;
  virtual std::int64_t sequence() const = 0;
  /// Writes the S tokens of sample `index` in [0, size()) and their targets, which are the next
  /// tokens or kIgnoredTarget. Throws Error for a token outside the vocabulary.
  virtual void read(std::int64_t index, std::span<std::int64_t> inputs,
                    std::span<std::int64_t> targets) const = 0;
  /// Whether samples may have kIgnoredTarget.
  virtual bool ignores_targets() const { return false; }
  /// For messages: "13 tokens, which is 4 samples of 3 tokens".
  virtual std::string description() const = 0;
};
/// Shared by the loaders that read the samples.
using SampleSourcePtr = std::shared_ptr<const SampleSource>;

/// floor((N - 1) / S) samples of N tokens: sample n has the tokens [n * S, n * S + S + 1). The
/// first S are inputs, the last S targets. Throws Error for a token outside [0, vocabulary) among
/// the first 2^26 tokens; later tokens are checked when they are read.
SampleSourcePtr token_windows(TokenSourcePtr tokens, std::int64_t sequence,
                              std::int64_t vocabulary);

/// How prompt_completions() makes samples.
struct PromptOptions {
  std::string prompt_field = "prompt";
  std::string completion_field = "completion";
  std::vector<std::int64_t> begin = {};  ///< tokens before each prompt
  std::vector<std::int64_t> end = {0};   ///< tokens behind each completion; not empty
  /// Cut samples that are too long at their end, and prompts that leave no room at their beginning.
  /// Conversations are cut at their end only.
  bool truncate = false;
};

/// A line of JSON Lines files.
struct JsonLine {
  std::string text;
  std::string origin;  ///< file and line, for messages
};

/// Returns the next line, or nullopt at the end.
using JsonLines = std::function<std::optional<JsonLine>()>;

/// One sample for each object of JSON Lines: the tokens of `begin`, prompt, completion and `end`,
/// then the last token of `end` repeated up to `sequence` tokens. The tokens of the completion and
/// `end` are targets. Prompt and completion are tokenized together, or each alone if a token would
/// cover both.
///
/// Both fields may be lists of equal length, for a conversation that a chat template has written:
/// prompt, completion, prompt, completion and so on. The text is complete: `begin` and `end` are
/// not added. All completions are targets; a token that covers a border belongs to the part behind
/// it.
///
/// Reads and tokenizes all lines at once and stores the tokens in 4 bytes each. Blank lines are
/// ignored. Throws Error, with file and line, for lines that json_text_lists() refuses, for samples
/// of more than `sequence` + 1 tokens and prompts that leave no room for a target, unless they are
/// truncated, and for files without objects.
SampleSourcePtr prompt_completions(const JsonLines& lines, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options);
/// The lines of a file that is not compressed.
SampleSourcePtr prompt_completions(const std::string& file, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options);

}  // namespace tessera::data
TESSERA_API_END
