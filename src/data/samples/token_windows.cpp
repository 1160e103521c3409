// Samples that lie one behind the other in a sequence of tokens.

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/data/samples.h"

namespace tessera::data {
namespace {

/// How many tokens are checked before the first step, which takes a second at most. Later ones are
/// checked when they are read.
constexpr std::int64_t kCheckedAtStart = std::int64_t{1} << 26;
/// A piece that stays in the cache.
constexpr std::int64_t kCheckedAtOnce = std::int64_t{1} << 16;

class TokenWindows final : public SampleSource {
 public:
  TokenWindows(TokenSourcePtr tokens, std::int64_t sequence, std::int64_t vocabulary)
      : tokens_(std::move(tokens)), sequence_(sequence), vocabulary_(vocabulary) {
    TESSERA_CHECK(sequence > 0 && vocabulary > 0, "sequence ", sequence, " and vocabulary ",
                  vocabulary, " must be positive");
    check_start();
  }

  // A sample takes one token more than its inputs, the last target, which is the first input of the
  // next sample.
  std::int64_t size() const override {
    return std::max<std::int64_t>(tokens_->size() - 1, 0) / sequence_;
  }

  std::int64_t sequence() const override { return sequence_; }

  void read(std::int64_t index, std::span<std::int64_t> inputs,
            std::span<std::int64_t> targets) const override {
    std::vector<std::int64_t> sample(static_cast<std::size_t>(sequence_) + 1);
    const std::int64_t begin = index * sequence_;
    tokens_->read(begin, sample);
    check_vocabulary(begin, sample);
    std::copy(sample.begin(), sample.end() - 1, inputs.begin());
    std::copy(sample.begin() + 1, sample.end(), targets.begin());
  }

  std::string description() const override {
    return std::to_string(tokens_->size()) + " tokens, which is " + std::to_string(size()) +
           (size() == 1 ? " sample of " : " samples of ") + std::to_string(sequence_) + " tokens";
  }

 private:
  /// A wrong tokenizer shows in nearly every text: better before the first step than in the middle
  /// of an epoch.
  void check_start() const {
    const std::int64_t end = std::min(tokens_->size(), kCheckedAtStart);
    std::vector<std::int64_t> piece;
    for (std::int64_t begin = 0; begin < end; begin += kCheckedAtOnce) {
      piece.resize(static_cast<std::size_t>(std::min(kCheckedAtOnce, end - begin)));
      tokens_->read(begin, piece);
      check_vocabulary(begin, piece);
    }
  }

  /// An index outside of an embedding would be a crash on a GPU, far from its cause. `begin` is for
  /// the message.
  void check_vocabulary(std::int64_t begin, std::span<const std::int64_t> tokens) const {
    const auto outside = [this](std::int64_t token) { return token < 0 || token >= vocabulary_; };
    const auto bad = std::find_if(tokens.begin(), tokens.end(), outside);
    TESSERA_CHECK(bad == tokens.end(), "token ", *bad, " at position ",
                  begin + (bad - tokens.begin()), " of the data is outside the vocabulary of ",
                  vocabulary_, ": use the tokenizer that this model was made for");
  }

  TokenSourcePtr tokens_;
  std::int64_t sequence_, vocabulary_;
};

}  // namespace

SampleSourcePtr token_windows(TokenSourcePtr tokens, std::int64_t sequence,
                              std::int64_t vocabulary) {
  return std::make_shared<TokenWindows>(std::move(tokens), sequence, vocabulary);
}

}  // namespace tessera::data
