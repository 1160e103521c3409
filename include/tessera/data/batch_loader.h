#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/data/token_shards.h"
#include "tessera/data/tokenizer.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// A source of samples of S = sequence() tokens, read by index. Threads may share a source.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  virtual std::int64_t size() const = 0;
  virtual std::int64_t sequence() const = 0;
  /// Writes the S input tokens of sample `index` in [0, size()), and one target per input token. A
  /// target is the next token, or -100 if the loss ignores the target. Throws Error for a token
  /// outside the vocabulary.
  virtual void read(std::int64_t index, std::span<std::int64_t> inputs,
                    std::span<std::int64_t> targets) const = 0;
  /// Whether samples can have targets of -100, which the loss ignores.
  virtual bool ignores_targets() const { return false; }
  /// Returns a description of the source for messages: "13 tokens, which is 4 samples of 3 tokens".
  virtual std::string description() const = 0;
};
/// A shared pointer to a source of samples, because several loaders may read one source.
using SampleSourcePtr = std::shared_ptr<const SampleSource>;

/// Splits N tokens into floor((N - 1) / S) samples. Sample n has the inputs [n * S, n * S + S), and
/// the targets one token later. Throws Error for a token outside [0, vocabulary): at once in the
/// first 2^26 tokens, otherwise when the token is read.
SampleSourcePtr token_windows(TokenSourcePtr tokens, std::int64_t sequence,
                              std::int64_t vocabulary);

/// Options of prompt_completions().
struct PromptOptions {
  std::string prompt_field = "prompt";
  std::string completion_field = "completion";
  std::vector<std::int64_t> begin = {};  ///< tokens inserted before each prompt
  std::vector<std::int64_t> end = {0};   ///< tokens appended to each completion; not empty
  /// Whether to cut samples that are too long. Samples are cut at the end. A prompt without room
  /// for a target is cut at the beginning, except in a conversation.
  bool truncate = false;
};

/// A function that returns the next non-blank line of a JSON Lines file, and the file name and line
/// number for messages. Returns nullopt after the last line.
using JsonLines = std::function<std::optional<std::pair<std::string, std::string>>()>;

/// Makes one sample from each object in JSON Lines: the tokens of `begin`, prompt, completion and
/// `end`, padded to `sequence` tokens with the last token of `end`. Only tokens of the completion
/// and of `end` are targets. No token covers both prompt and completion.
///
/// For a conversation, prompt and completion are lists of equal length: turn i is prompt[i],
/// completion[i], as formatted by a chat template. `begin` and `end` are not added. All completions
/// are targets.
///
/// All lines are read at construction. Throws Error, with file and line, for lines that
/// json_text_lists() rejects, for files without objects and, without `truncate`, for samples that
/// are too long.
SampleSourcePtr prompt_completions(const JsonLines& lines, const Tokenizer& tokenizer,
                                   std::int64_t sequence, const PromptOptions& options);

class Mixture;

/// A source of samples with a weight. The source's fraction of all samples is the source's weight
/// divided by the sum of all weights.
struct WeightedSamples {
  SampleSourcePtr samples;
  double weight = 1;
};

/// Options of BatchLoader.
struct BatchOptions {
  std::int64_t batch = 1;  ///< number of sequences per step, over all ranks
  /// Seed of the shuffle; nullopt: no shuffle. Each pass over a source of samples has a new order.
  std::optional<std::uint64_t> shuffle = std::nullopt;
  /// The token that ends a document. Token positions restart at 0 after this token. This token's
  /// target is -100, which the loss ignores.
  std::optional<std::int64_t> document_end = std::nullopt;
};

/// The rows [first, last) of a batch.
struct RowRange {
  std::int64_t first = 0, last = 0;
};

/// Returns the rows of a batch that `rank` loads. Each of the `micro_batches` micro-batches is
/// divided among the ranks, so micro-batches have the same rows on any number of ranks. Throws
/// Error unless ranks * micro_batches divides the batch.
std::vector<RowRange> rows_of_rank(std::int64_t batch, std::int64_t micro_batches,
                                   std::int64_t rank, std::int64_t ranks);

/// Loads batches of samples. Row i of step s is sample s * batch + i of the global order. The
/// global order mixes the sources in proportion to the weights. With a shuffle, each pass over a
/// source is a new permutation, equal on every mesh. Each rank creates the same loader and loads
/// only its rows. Not collective. Thread safe, because immutable.
class BatchLoader {
 public:
  /// Throws Error if a source has too few samples for its fraction of a batch, if sequence lengths
  /// differ, and for weights that are not positive.
  BatchLoader(std::vector<WeightedSamples> sources, const BatchOptions& options);

  /// The sequences that one rank reads in one step.
  struct Batch {
    at::Tensor inputs;     ///< input tokens, (rows, S) int64, on the CPU
    at::Tensor targets;    ///< target tokens, (rows, S) int64, on the CPU
    at::Tensor positions;  ///< position of each token in its document, (rows, S) int64
    /// `positions` in host memory, so that a Llama model finds document borders without waiting for
    /// a GPU. `positions` and `host_positions` are undefined unless BatchOptions::document_end is
    /// set.
    at::Tensor host_positions{};

    /// Returns a copy on `device`. Copies to a GPU are queued on the current stream; with a pinned
    /// batch, the caller does not wait for the copy.
    Batch to(c10::Device device) const;
    /// Returns a view of rows [first, first + count).
    Batch rows(std::int64_t first, std::int64_t count) const;
  };
  /// Loads the rows `ranges` of the batch of `step` (from 0), concatenated. `pinned`: use
  /// page-locked memory, for CUDA. Throws Error for a token outside the vocabulary.
  Batch load(std::int64_t step, const std::vector<RowRange>& ranges, bool pinned = false) const;
  /// Returns the number of distinct samples over all sources.
  std::int64_t samples() const;
  /// Whether targets can be -100, which the loss ignores. If so, ranks can have different numbers
  /// of targets that count in the loss.
  bool ignores_targets() const;

 private:
  struct Place {
    const SampleSource* source;
    std::int64_t sample;
  };
  Place place(std::int64_t n) const;
  /// Reads sample `n` of the global order into row `i` of `batch`.
  void read_row(std::int64_t n, const Batch& batch, std::int64_t i) const;
  void check_sizes() const;

  std::vector<WeightedSamples> sources_;
  BatchOptions options_;
  std::int64_t sequence_ = 0;
  std::shared_ptr<const Mixture> mixture_;
};

/// Loads a rank's rows of the next step on a background thread during the current step. Steps may
/// be loaded in any order. The destructor waits for the thread. Not thread safe.
class PrefetchLoader {
 public:
  /// Loads the rows `ranges` of the batches of `loader`, concatenated. `pinned`: see
  /// BatchLoader::load(). Without `background`, load() itself reads the next step, so that the
  /// order of allocations is deterministic.
  PrefetchLoader(std::shared_ptr<const BatchLoader> loader, std::vector<RowRange> ranges,
                 bool pinned = false, bool background = true);
  /// Returns the rows of `step` and starts to load the next step. Throws the errors of
  /// BatchLoader::load() for `step`.
  BatchLoader::Batch load(std::int64_t step);

 private:
  void begin(std::int64_t step);

  std::shared_ptr<const BatchLoader> loader_;
  std::vector<RowRange> ranges_;
  bool pinned_, background_;
  std::int64_t step_ = -1;                 ///< the step that the background thread is loading
  std::future<BatchLoader::Batch> batch_;  ///< the batch being loaded; the destructor waits for it
};

}  // namespace tessera::data
TESSERA_API_END
