#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tessera/data/samples.h"
#include "tessera/data/token_shards.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

class Mixture;

/// A source of samples. Its share of the samples is its weight over the sum of all weights.
struct WeightedSamples {
  SampleSourcePtr samples;
  double weight = 1;
};

/// How samples become batches.
struct BatchOptions {
  std::int64_t batch = 1;  ///< sequences
  /// Seed of the order of samples, which differs in each pass over a source.
  std::optional<std::uint64_t> shuffle = std::nullopt;
  /// The token that ends a document. Positions restart after it, and its target, a token of another
  /// document, becomes kIgnoredTarget.
  std::optional<std::int64_t> document_end = std::nullopt;
};

/// Rows [first, last) of a batch.
struct RowRange {
  std::int64_t first = 0, last = 0;
};

/// The rows of a rank for a batch in `micro_batches` parts. Each part is divided among the ranks,
/// so a micro-batch has the same rows, and its dropout the same random numbers, on any number of
/// ranks. Throws Error unless ranks times micro-batches divide the batch.
std::vector<RowRange> rows_of_rank(std::int64_t batch, std::int64_t micro_batches,
                                   std::int64_t rank, std::int64_t ranks);

/// Batches of samples. Row i of step s is sample n = s * batch + i of the order. With one source
/// that is its sample n, modulo their number. With several sources each source has its weight's
/// share of the first N samples, within log2 of the number of sources; a source gives its samples
/// in order and repeats. With a shuffle each pass over a source has another order, which has each
/// sample once and is the same on every mesh. Every rank makes the same loader and loads its own
/// rows: not collective. A run may continue from any step. Immutable, so threads may share it.
class BatchLoader {
 public:
  /// Throws Error if a source has too few samples for its share of a batch, if sequence lengths
  /// differ, and for weights that are not positive.
  BatchLoader(std::vector<WeightedSamples> sources, const BatchOptions& options);
  /// Batches of token_windows().
  BatchLoader(TokenSourcePtr tokens, std::int64_t batch, std::int64_t sequence,
              std::int64_t vocabulary, std::optional<std::uint64_t> shuffle = std::nullopt);

  /// The sequences of one rank in one step.
  struct Batch {
    at::Tensor inputs;     ///< (rows, S) int64, on the CPU
    at::Tensor targets;    ///< (rows, S) int64, on the CPU
    at::Tensor positions;  ///< (rows, S) int64, within the document; undefined without documents
    /// The positions in host memory, so that a Llama finds its documents without waiting for a GPU.
    at::Tensor host_positions{};

    /// A copy on `device`. Copies to a GPU are queued on the current stream; a pinned batch does
    /// not make the caller wait.
    Batch to(c10::Device device) const;
    /// Rows [first, first + count), in the same memory.
    Batch rows(std::int64_t first, std::int64_t count) const;
  };
  /// Rows [first, last) of the batch of `step`, which counts from 0. `pinned`: in page-locked
  /// memory, for CUDA. Throws Error for a token outside the vocabulary, with its position.
  Batch load(std::int64_t step, std::int64_t first, std::int64_t last, bool pinned = false) const;
  /// Several ranges, concatenated.
  Batch load(std::int64_t step, std::span<const RowRange> ranges, bool pinned = false) const;
  /// The number of distinct samples of all sources.
  std::int64_t samples() const;
  /// Whether targets may be kIgnoredTarget: the number of counted targets then differs by rank.
  bool ignores_targets() const;

 private:
  struct Place {
    const SampleSource* source;
    std::int64_t sample;
  };
  Place place(std::int64_t n) const;
  /// Sample n of the order into row i.
  void read_row(std::int64_t n, const Batch& batch, std::int64_t i) const;
  void check_sizes() const;

  std::vector<WeightedSamples> sources_;
  BatchOptions options_;
  std::int64_t sequence_ = 0;
  std::shared_ptr<const Mixture> mixture_;
};

/// Loads a rank's rows of the next step on another thread during a step. Steps may be loaded in any
/// order. Not thread safe. The destructor waits for the thread.
class PrefetchLoader {
 public:
  /// Rows [first, last) of the batches of `loader`; `pinned` as in BatchLoader::load(). Without
  /// `beside` there is no thread: load() reads the next step before it returns, so that the order
  /// of allocations is always the same.
  PrefetchLoader(std::shared_ptr<const BatchLoader> loader, std::int64_t first, std::int64_t last,
                 bool pinned = false, bool beside = true);
  /// Several ranges, concatenated.
  PrefetchLoader(std::shared_ptr<const BatchLoader> loader, std::vector<RowRange> ranges,
                 bool pinned = false, bool beside = true);
  /// The rows of `step`. Begins to load the next step. Throws the errors of that step's
  /// BatchLoader::load().
  BatchLoader::Batch load(std::int64_t step);

 private:
  void begin(std::int64_t step);

  std::shared_ptr<const BatchLoader> loader_;
  std::vector<RowRange> ranges_;
  bool pinned_, beside_;
  std::int64_t step_ = -1;                 ///< the step that is being loaded
  std::future<BatchLoader::Batch> batch_;  ///< from std::async: its destructor waits
};

}  // namespace tessera::data
TESSERA_API_END
