#include "tessera/data/batch_loader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::data {

namespace {

/// How many tokens are looked at before the first step: a second's work at most. What lies beyond
/// is checked as it is read.
constexpr std::int64_t kCheckedAtStart = std::int64_t{1} << 26;
constexpr std::int64_t kCheckedAtOnce = std::int64_t{1} << 16;

}  // namespace

BatchLoader::BatchLoader(TokenSourcePtr tokens, std::int64_t batch, std::int64_t sequence,
                         std::int64_t vocabulary)
    : tokens_(std::move(tokens)), batch_(batch), sequence_(sequence), vocabulary_(vocabulary) {
  TESSERA_CHECK(batch > 0 && sequence > 0 && vocabulary > 0, "batch ", batch, ", sequence ",
                sequence, " and vocabulary ", vocabulary, " must be positive");
  samples_ = std::max<std::int64_t>(tokens_->size() - 1, 0) / sequence;
  TESSERA_CHECK(samples_ >= batch, "the data hold ", tokens_->size(), " tokens, which is ",
                samples_, " samples of ", sequence, " tokens, fewer than the batch of ", batch,
                ": give more data, a smaller batch or a shorter sequence");
  check_start();
}

void BatchLoader::check_start() const {
  const std::int64_t end = std::min(tokens_->size(), kCheckedAtStart);
  std::vector<std::int64_t> piece;
  for (std::int64_t begin = 0; begin < end; begin += kCheckedAtOnce) {
    piece.resize(static_cast<std::size_t>(std::min(kCheckedAtOnce, end - begin)));
    tokens_->read(begin, piece);
    check_vocabulary(begin, piece);
  }
}

BatchLoader::Batch BatchLoader::load(std::int64_t step, std::int64_t first,
                                     std::int64_t last) const {
  TESSERA_CHECK(step >= 0 && first >= 0 && first <= last && last <= batch_, "rows [", first, ", ",
                last, ") of step ", step, " were asked for, but a batch has rows [0, ", batch_,
                ")");
  Batch result{at::empty({last - first, sequence_}, at::kLong),
               at::empty({last - first, sequence_}, at::kLong)};
  auto* inputs = result.inputs.mutable_data_ptr<std::int64_t>();
  auto* targets = result.targets.mutable_data_ptr<std::int64_t>();
  std::vector<std::int64_t> sample(static_cast<std::size_t>(sequence_) + 1);
  for (std::int64_t row = first; row < last; ++row) {
    const std::int64_t begin = (step * batch_ + row) % samples_ * sequence_;
    tokens_->read(begin, sample);
    check_vocabulary(begin, sample);
    inputs = std::copy(sample.begin(), sample.end() - 1, inputs);
    targets = std::copy(sample.begin() + 1, sample.end(), targets);
  }
  return result;
}

void BatchLoader::check_vocabulary(std::int64_t begin, std::span<const std::int64_t> tokens) const {
  const auto outside = [this](std::int64_t token) { return token < 0 || token >= vocabulary_; };
  const auto bad = std::find_if(tokens.begin(), tokens.end(), outside);
  TESSERA_CHECK(bad == tokens.end(), "token ", *bad, " at position ",
                begin + (bad - tokens.begin()), " of the data is outside the vocabulary of ",
                vocabulary_, ": use the tokenizer that this model was made for");
}

}  // namespace tessera::data
