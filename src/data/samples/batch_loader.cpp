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

/// Rows [first, last) of the batch: inputs and targets, (rows, sequence) each.
BatchLoader::Batch BatchLoader::load(std::int64_t step, std::int64_t first, std::int64_t last,
                                     bool pinned) const {
  TESSERA_CHECK(step >= 0, "the batch of step ", step, " was asked for; steps count from 0");
  TESSERA_CHECK(first >= 0 && first <= last && last <= options_.batch, "rows [", first, ", ", last,
                ") of step ", step, " were asked for, but a batch has rows [0, ", options_.batch,
                ")");
  const auto tensor = [&] {
    return at::empty({last - first, sequence_}, at::dtype(at::kLong).pinned_memory(pinned));
  };
  Batch result{tensor(), tensor(), options_.document_end ? tensor() : at::Tensor()};
  result.host_positions = result.positions;
  const auto length = static_cast<std::size_t>(sequence_);
  const auto row = [&](const at::Tensor& all, std::int64_t i) {
    return std::span(all.mutable_data_ptr<std::int64_t>() + i * sequence_, length);
  };
  for (std::int64_t i = 0; i < last - first; ++i) {
    const Place from = place(step * options_.batch + first + i);
    from.source->read(from.sample, row(result.inputs, i), row(result.targets, i));
    if (options_.document_end) {
      part_documents(*options_.document_end, row(result.inputs, i), row(result.targets, i),
                     row(result.positions, i));
    }
  }
  return result;
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
