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

/// A part of the data, and how often its samples are taken: `weight` against those of the others.
struct WeightedSamples {
  SampleSourcePtr samples;
  double weight = 1;
};

/// How samples become batches.
struct BatchOptions {
  std::int64_t batch = 1;  ///< sequences
  /// The seed of an order for each pass over a source.
  std::optional<std::uint64_t> shuffle = std::nullopt;
  /// The token that ends a document. Positions start again after it, and its own target, which
  /// would be another document's token, is kIgnoredTarget.
  std::optional<std::int64_t> document_end = std::nullopt;
};

/// Rows [first, last) of a batch.
struct RowRange {
  std::int64_t first = 0, last = 0;
};

/// The rows of rank `rank` in a batch that all ranks compute in `micro_batches` parts, one after
/// the other: each part is shared out among the ranks. So a micro-batch has the same rows on any
/// number of ranks, and its dropout the same random numbers. Throws Error unless ranks times
/// micro-batches divide the batch.
std::vector<RowRange> rows_of_rank(std::int64_t batch, std::int64_t micro_batches,
                                   std::int64_t rank, std::int64_t ranks);

/// Batches of samples. Row i of step s is sample n = s * batch + i of the order. One source: sample
/// n of it, modulo their number. Several sources: among the first N samples of the order each
/// source has its weight's share, to within log2 of the number of sources; it gives its samples in
/// their order, and starts again after the last. With a shuffle each pass over a source has its own
/// order, drawn by the seed: each sample once, the same on every mesh. Every rank makes the same
/// loader and loads its own rows: not collective, and a run may continue from any step. Immutable,
/// so threads may share it.
class BatchLoader {
 public:
  /// Throws Error if a source has fewer samples than a batch may take of it, for sources of several
  /// sequence lengths, and for weights that are not positive.
  BatchLoader(std::vector<WeightedSamples> sources, const BatchOptions& options);
  /// Batches of token_windows().
  BatchLoader(TokenSourcePtr tokens, std::int64_t batch, std::int64_t sequence,
              std::int64_t vocabulary, std::optional<std::uint64_t> shuffle = std::nullopt);

  /// The sequences of one rank in one step.
  struct Batch {
    at::Tensor inputs;     ///< (rows, S) int64, on the CPU
    at::Tensor targets;    ///< (rows, S) int64, on the CPU
    at::Tensor positions;  ///< (rows, S) int64, of tokens in their document; undefined without any
    /// The positions where to() has found them, of which a Llama makes its documents without
    /// waiting for a GPU.
    at::Tensor host_positions{};

    /// The same on `device`. To a GPU the copies are queued on the current stream, and the caller
    /// does not wait if the batch is pinned.
    Batch to(c10::Device device) const;
    /// Rows [first, first + count), in the same memory.
    Batch rows(std::int64_t first, std::int64_t count) const;
  };
  /// Rows [first, last) of the batch of `step` (0-based). `pinned`: in page-locked memory, for a
  /// program that uses CUDA. Throws Error for a token that the model does not have, with its
  /// position.
  Batch load(std::int64_t step, std::int64_t first, std::int64_t last, bool pinned = false) const;
  /// The same of several ranges, one behind the other.
  Batch load(std::int64_t step, std::span<const RowRange> ranges, bool pinned = false) const;
  /// The number of distinct samples of all sources.
  std::int64_t samples() const;
  /// Whether targets may be kIgnoredTarget, so that ranks count differently many.
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

/// Loads a rank's rows of the next step on a separate thread while this one is computed. The rows
/// of a step are those that the loader gives for it, in whatever order steps are asked for: there
/// is no position. One thread at a time. The destructor waits for what is being read.
class PrefetchLoader {
 public:
  /// Rows [first, last) of the batches of `loader`; `pinned` as BatchLoader::load() takes it.
  /// Without `beside` load() reads the next step itself, before it returns: for code that tracks
  /// allocations, which then come in an order that does not depend on threads.
  PrefetchLoader(std::shared_ptr<const BatchLoader> loader, std::int64_t first, std::int64_t last,
                 bool pinned = false, bool beside = true);
  /// The same of several ranges, one behind the other.
  PrefetchLoader(std::shared_ptr<const BatchLoader> loader, std::vector<RowRange> ranges,
                 bool pinned = false, bool beside = true);
  /// Those of `step`, and begins to load those of the step behind it. Throws what load() throws, at
  /// the step that it is of.
  BatchLoader::Batch load(std::int64_t step);

 private:
  void begin(std::int64_t step);

  std::shared_ptr<const BatchLoader> loader_;
  std::vector<RowRange> ranges_;
  bool pinned_, beside_;
  std::int64_t step_ = -1;                 ///< the one that is being loaded
  std::future<BatchLoader::Batch> batch_;  ///< from std::async: its destructor waits
};

}  // namespace tessera::data
TESSERA_API_END
