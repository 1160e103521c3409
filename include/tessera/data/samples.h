#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tessera/data/token_source.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// The target of a token from which nothing is learnt: cross_entropy's ignore_index.
inline constexpr std::int64_t kIgnoredTarget = -100;

/// What a model learns from: samples of S = sequence() tokens, by number. Immutable, so threads may
/// share it.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  /// The number of samples.
  virtual std::int64_t size() const = 0;
  /// S, the same for all.
  virtual std::int64_t sequence() const = 0;
  /// Writes the S tokens of sample `index` in [0, size()), and their targets: for each the token
  /// that follows, or kIgnoredTarget. Throws Error for a token that the model does not have.
  virtual void read(std::int64_t index, std::span<std::int64_t> inputs,
                    std::span<std::int64_t> targets) const = 0;
  /// Whether samples may have kIgnoredTarget.
  virtual bool ignores_targets() const { return false; }
  /// How much there is, for messages: "13 tokens, which is 4 samples of 3 tokens".
  virtual std::string description() const = 0;
};
/// Shared by the loaders that read it.
using SampleSourcePtr = std::shared_ptr<const SampleSource>;

/// N tokens, cut up: sample n of floor((N - 1) / S) is tokens [n * S, n * S + S + 1), whose first S
/// are the inputs and last S the targets. Throws Error for a token id outside [0, vocabulary) among
/// the first 2^26 tokens; later ones are checked when they are read.
SampleSourcePtr token_windows(TokenSourcePtr tokens, std::int64_t sequence,
                              std::int64_t vocabulary);

}  // namespace tessera::data
TESSERA_API_END
