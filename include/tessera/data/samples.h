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

/// Training data: numbered samples of S = sequence() tokens. Immutable: several threads may use one
/// source.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  virtual std::int64_t size() const = 0;
  virtual std::int64_t sequence() const = 0;
  /// Writes the S input tokens of sample `index` in [0, size()) and the S targets. A target is the
  /// next token, or -100 if the loss ignores the target. Throws Error for a token outside the
  /// vocabulary.
  virtual void read(std::int64_t index, std::span<std::int64_t> inputs,
                    std::span<std::int64_t> targets) const = 0;
  /// Whether samples may have targets of -100, which the loss ignores.
  virtual bool ignores_targets() const { return false; }
  /// A description for messages: "13 tokens, which is 4 samples of 3 tokens".
  virtual std::string description() const = 0;
};
/// A shared pointer to a source of samples, because several loaders may read one source.
using SampleSourcePtr = std::shared_ptr<const SampleSource>;

/// Splits N tokens into floor((N - 1) / S) samples. Sample n covers the tokens [n * S, n * S + S +
/// 1): the first S are inputs, the last S are targets. Throws Error for a token outside [0,
/// vocabulary) among the first 2^26 tokens; later tokens are checked when they are read.
SampleSourcePtr token_windows(TokenSourcePtr tokens, std::int64_t sequence,
                              std::int64_t vocabulary);

/// Options of prompt_completions().
struct PromptOptions {
  std::string prompt_field = "prompt";
  std::string completion_field = "completion";
  std::vector<std::int64_t> begin = {};  ///< tokens inserted before each prompt
  std::vector<std::int64_t> end = {0};   ///< tokens appended to each completion; not empty
  /// Whether to cut samples that are too long. A sample is cut at its end; a prompt that leaves no
  /// room for a target is cut at its beginning. Conversations are cut only at their end.
  bool truncate = false;
};

/// One line of a JSON Lines file.
struct JsonLine {
  std::string text;
  std::string origin;  ///< file and line number of the text, for messages
};

/// A function that returns the next line of a JSON Lines file, or nullopt at the end.
using JsonLines = std::function<std::optional<JsonLine>()>;

/// Makes one sample of each object in JSON Lines. A sample is the tokens of `begin`, the prompt,
/// the completion and `end`, padded to `sequence` tokens with the last token of `end`. Only the
/// tokens of the completion and of `end` are targets. Prompt and completion are tokenized together,
/// unless a token would cover the end of the prompt and the start of the completion; in this case
/// prompt and completion are tokenized separately.
///
/// For a conversation that a chat template has formatted, the prompt and the completion may be
/// lists of equal length, read as prompt, completion, prompt, completion and so on. `begin` and
/// `end` are not added. All completions are targets; a token across a border belongs to the later
/// part.
///
/// Reads and tokenizes all lines at construction, and stores each token in 4 bytes. Blank lines are
/// ignored. Throws Error, with file and line:
/// - for lines that json_text_lists() rejects;
/// - without `truncate`, for samples of more than `sequence` + 1 tokens and for prompts that leave
///   no room for a target;
/// - for files without objects.
SampleSourcePtr prompt_completions(const JsonLines& lines, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options);
/// Makes one sample of each object in an uncompressed JSON Lines file, as prompt_completions()
/// makes from JsonLines.
SampleSourcePtr prompt_completions(const std::string& file, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options);

}  // namespace tessera::data
TESSERA_API_END
