#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>

#include "tessera/core/layout_math.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Rows of a tensor that get the random numbers of a separate tensor with only these rows.
struct RandomPart {
  std::uint64_t stream = 0;
  PartRows rows;
};

/// The key of counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers:
/// as easy as 1, 2, 3", 2011) with the global element as the counter. The value of an element
/// depends only on `seed`, `stream` and the element's row-major index in the global tensor, so it
/// is bit-equal on every mesh, and on CPU and CUDA. Give every parameter and every call a different
/// `stream`.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  /// The parts of a fused tensor (nn::FusedLinear), which together have all rows. Each part draws
  /// from its own stream instead of `stream`. Must stay valid during the call that gets the key.
  std::span<const RandomPart> parts{};
};

/// A stable stream number for a name (FNV-1a), for example a parameter's FQN.
std::uint64_t stream_of(const char* name);
/// The `index`-th of many streams derived from `stream`, for example one per call.
std::uint64_t substream(std::uint64_t stream, std::uint64_t index);

// Functions that fill a floating-point tensor, plain or distributed (not Partial), with random
// values. Values are computed in fp64 and rounded once to the tensor's type. Not collective. Thread
// safe for different tensors. Autograd does not see the write. Throw Error for other types.

/// Fills with uniform random numbers in [from, to].
void uniform_(const at::Tensor& tensor, double from, double to, RandomKey key);
/// Fills with normal random numbers, by inverse CDF (Wichura's AS241).
void normal_(const at::Tensor& tensor, double mean, double std, RandomKey key);
/// Fills with random numbers of a normal distribution truncated to [low, high], by inverse CDF.
void trunc_normal_(const at::Tensor& tensor, double mean, double std, double low, double high,
                   RandomKey key);
/// Sets each element to 1 with probability `p`, otherwise to 0.
void bernoulli_(const at::Tensor& tensor, double p, RandomKey key);

namespace detail {
class RandomRegionScope;
}

/// During this scope, this thread's tensors are part `index` of `count` equal parts along dimension
/// 0, for dropout and the random operators of at::. BatchPart(0, 1) declares that they are whole.
/// With it, data-parallel ranks draw the numbers that a single rank draws for the full batch. Plain
/// tensors use manual_seed then, too. The forward of a module with fully_shard does this itself for
/// its rows; use BatchPart inside such a forward only if the library cannot know the rows. An inner
/// scope replaces an outer one.
class BatchPart {
 public:
  BatchPart(std::int64_t index, std::int64_t count);
  ~BatchPart();
  BatchPart(const BatchPart&) = delete;
  BatchPart& operator=(const BatchPart&) = delete;

 private:
  std::unique_ptr<detail::RandomRegionScope> scope_;
};

}  // namespace tessera
TESSERA_API_END
