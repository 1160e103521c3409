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
  /// Writes the S input tokens of sample `index` in [0, size()) and the target of each input token.
  /// A target is the next token, or -100 if the loss ignores the target. Throws Error for a token
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

/// Splits N tokens into floor((N - 1) / S) samples. Sample n covers the tokens [n * S, n * S + S +
/// 1): the first S are inputs, the last S are targets. Throws Error for a token outside [0,
/// vocabulary) among the first 2^26 tokens; later tokens are checked when read.
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

/// A function that returns the next line of a JSON Lines file that is not blank, with the file's
/// name and the line's number for messages. Returns nullopt after the last line.
using JsonLines = std::function<std::optional<std::pair<std::string, std::string>>()>;

/// Makes one sample from each object in JSON Lines. A sample is the tokens of `begin`, the prompt,
/// the completion and `end`, padded to `sequence` tokens with the last token of `end`. Only the
/// tokens of the completion and of `end` are targets. Prompt and completion are tokenized together,
/// unless a token would cover the end of the prompt and the start of the completion; in this case
/// prompt and completion are tokenized separately.
///
/// Prompt and completion may also be the lists of turns of a conversation that a chat template has
/// formatted: turn i is prompt[i], completion[i]. The lists must have equal length. `begin` and
/// `end` are not added. All completions are targets. A token that covers the end of one text and
/// the start of the next belongs to the next text.
///
/// Reads and tokenizes all lines at construction, and stores each token in 4 bytes. Throws Error,
/// with file and line:
/// - for lines that json_text_lists() rejects;
/// - without `truncate`, for samples of more than `sequence` + 1 tokens and for prompts that leave
///   no room for a target;
/// - for files without objects.
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
  /// The token that ends a document. Token positions restart at 0 after this token. The token's
  /// target would belong to the next document, and is therefore -100, which the loss ignores.
  std::optional<std::int64_t> document_end = std::nullopt;
};

/// The rows [first, last) of a batch.
struct RowRange {
  std::int64_t first = 0, last = 0;
};

/// Returns the rows that `rank` loads of a batch of `micro_batches` micro-batches. Each micro-batch
/// is divided among the ranks, so the rows and the dropout masks of a micro-batch are the same on
/// any number of ranks. Throws Error unless the batch is divisible by ranks * micro_batches.
std::vector<RowRange> rows_of_rank(std::int64_t batch, std::int64_t micro_batches,
                                   std::int64_t rank, std::int64_t ranks);

/// Loads batches of samples. Row i of step s is sample n = s * batch + i of the global order. With
/// one source, sample n is the source's sample n modulo size(). With several sources, each source's
/// fraction of the first N samples is proportional to its weight, with an error of at most
/// log2(sources) samples. Each source supplies its samples in order, again and again. With a
/// shuffle, each pass over a source is a new permutation, which is the same on every mesh. Every
/// rank creates the same loader and loads only its rows; not collective. A run may continue from
/// any step. Immutable: several threads may use one loader.
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
  /// Loads the rows `ranges` of the batch of `step`, concatenated; steps count from 0. With
  /// `pinned`, the batch is in page-locked memory, for CUDA. Throws Error for a token outside the
  /// vocabulary.
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

/// Loads a rank's rows of the next step on a background thread while the current step runs. Steps
/// may be loaded in any order. Not thread safe. The destructor waits for the background thread.
class PrefetchLoader {
 public:
  /// Loads the rows `ranges` of the batches of `loader`, concatenated; `pinned`: see
  /// BatchLoader::load(). Without `background`, no thread is used: load() reads the next step
  /// before it returns, so that the order of allocations is deterministic.
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
