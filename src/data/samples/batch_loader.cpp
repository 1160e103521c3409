// Batches by step number. There is no state: a batch depends only on the step and the data, so that
// a resumed run reads the same batches, and each data-parallel rank loads its rows independently.

#include "tessera/data/batch_loader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>

#include "samples/mixture.h"
#include "samples/permutation.h"
#include "tessera/core/error.h"

namespace tessera::data {

namespace {

std::vector<double> weights_of(const std::vector<WeightedSamples>& sources) {
  std::vector<double> weights;
  for (const WeightedSamples& source : sources) {
    TESSERA_CHECK(source.weight > 0 && std::isfinite(source.weight), "a weight of the data is ",
                  source.weight, "; weights are positive numbers");
    weights.push_back(source.weight);
  }
  return weights;
}

/// For one row: sets each token's position within its document. The token after an end belongs to
/// another document, and is not a target.
void part_documents(std::int64_t end, std::span<const std::int64_t> inputs,
                    std::span<std::int64_t> targets, std::span<std::int64_t> positions) {
  std::int64_t position = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    positions[i] = position++;
    if (inputs[i] == end) {
      targets[i] = kIgnoredTarget;
      position = 0;
    }
  }
}

}  // namespace

std::vector<RowRange> rows_of_rank(std::int64_t batch, std::int64_t micro_batches,
                                   std::int64_t rank, std::int64_t ranks) {
  TESSERA_CHECK(
      micro_batches > 0 && rank >= 0 && rank < ranks && batch % (micro_batches * ranks) == 0,
      "the rows of rank ", rank, " of ", ranks, " in a batch of ", batch, " and ", micro_batches,
      " micro-batches were asked for; ranks times micro-batches must divide the batch");
  const std::int64_t count = batch / micro_batches / ranks;
  std::vector<RowRange> rows;
  for (std::int64_t i = 0; i < micro_batches; ++i) {
    const std::int64_t first = (i * ranks + rank) * count;
    rows.push_back({first, first + count});
  }
  return rows;
}

BatchLoader::BatchLoader(std::vector<WeightedSamples> sources, const BatchOptions& options)
    : sources_(std::move(sources)), options_(options) {
  TESSERA_CHECK(options.batch > 0 && !sources_.empty(), "batches of ", options.batch,
                " samples of ", sources_.size(), " sources were asked for; both must be positive");
  sequence_ = sources_.front().samples->sequence();
  mixture_ = std::make_shared<Mixture>(weights_of(sources_));
  check_sizes();
}

BatchLoader::BatchLoader(TokenSourcePtr tokens, std::int64_t batch, std::int64_t sequence,
                         std::int64_t vocabulary, std::optional<std::uint64_t> shuffle)
    : BatchLoader(std::vector<WeightedSamples>{{.samples = token_windows(std::move(tokens),
                                                                         sequence, vocabulary)}},
                  {.batch = batch, .shuffle = shuffle}) {}

void BatchLoader::check_sizes() const {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const SampleSource& source = *sources_[i].samples;
    TESSERA_CHECK(source.sequence() == sequence_, "a source has sequences of ", source.sequence(),
                  " tokens and another of ", sequence_, "; give all the same");
    // If rows wrapped around, a step would contain samples twice.
    const std::int64_t most = mixture_->most(i, options_.batch);
    const bool alone = sources_.size() == 1;
    TESSERA_CHECK(source.size() >= most, alone ? "the data hold " : "a source holds ",
                  source.description(), ", fewer than the ", alone ? "" : "part of it in a ",
                  "batch of ", options_.batch, alone ? "" : " (" + std::to_string(most) + ")",
                  ": give more data, a smaller batch or a shorter sequence");
  }
}

BatchLoader::Batch BatchLoader::load(std::int64_t step, std::int64_t first, std::int64_t last,
                                     bool pinned) const {
  const RowRange rows{first, last};
  return load(step, std::span(&rows, 1), pinned);
}

BatchLoader::Batch BatchLoader::load(std::int64_t step, std::span<const RowRange> ranges,
                                     bool pinned) const {
  TESSERA_CHECK(step >= 0, "the batch of step ", step, " was asked for; steps count from 0");
  std::int64_t rows = 0;
  for (const auto [first, last] : ranges) {
    TESSERA_CHECK(first >= 0 && first <= last && last <= options_.batch, "rows [", first, ", ",
                  last, ") of step ", step, " were asked for, but a batch has rows [0, ",
                  options_.batch, ")");
    rows += last - first;
  }
  const auto tensor = [&] {
    return at::empty({rows, sequence_}, at::dtype(at::kLong).pinned_memory(pinned));
  };
  Batch result{tensor(), tensor(), options_.document_end ? tensor() : at::Tensor()};
  result.host_positions = result.positions;
  std::int64_t i = 0;
  for (const auto [first, last] : ranges) {
    for (std::int64_t row = first; row < last; ++row) {
      read_row(step * options_.batch + row, result, i++);
    }
  }
  return result;
}

void BatchLoader::read_row(std::int64_t n, const Batch& batch, std::int64_t i) const {
  const auto row = [&](const at::Tensor& all) {
    return std::span(all.mutable_data_ptr<std::int64_t>() + i * sequence_,
                     static_cast<std::size_t>(sequence_));
  };
  const Place from = place(n);
  from.source->read(from.sample, row(batch.inputs), row(batch.targets));
  if (options_.document_end) {
    part_documents(*options_.document_end, row(batch.inputs), row(batch.targets),
                   row(batch.positions));
  }
}

/// All samples of a source, and again after the last one.
BatchLoader::Place BatchLoader::place(std::int64_t n) const {
  const Mixture::Place at = (*mixture_)(n);
  const SampleSource* source = sources_[at.source].samples.get();
  const std::int64_t sample = at.index % source->size();
  if (!options_.shuffle) {
    return {source, sample};
  }
  // Sources of one size must not be drawn alike.
  const std::uint64_t seed = *options_.shuffle + at.source * 0x9e3779b97f4a7c15;
  const auto pass = static_cast<std::uint64_t>(at.index / source->size());
  return {source, Permutation(source->size(), seed, pass)(sample)};
}

std::int64_t BatchLoader::samples() const {
  std::int64_t sum = 0;
  for (const WeightedSamples& source : sources_) {
    sum += source.samples->size();
  }
  return sum;
}

bool BatchLoader::ignores_targets() const {
  return options_.document_end || std::ranges::any_of(sources_, [](const WeightedSamples& source) {
           return source.samples->ignores_targets();
         });
}

/// Pinned memory may be freed at once: its allocator keeps it until the copies have run.
BatchLoader::Batch BatchLoader::Batch::to(c10::Device device) const {
  const auto copy = [device](const at::Tensor& host) {
    return host.defined() ? host.to(host.options().device(device).pinned_memory(false),
                                    /*non_blocking=*/true)
                          : host;
  };
  return {copy(inputs), copy(targets), copy(positions), host_positions};
}

BatchLoader::Batch BatchLoader::Batch::rows(std::int64_t first, std::int64_t count) const {
  const auto part = [&](const at::Tensor& all) {
    return all.defined() ? all.narrow(0, first, count) : all;
  };
  return {part(inputs), part(targets), part(positions), part(host_positions)};
}

}  // namespace tessera::data
