#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>

#include "tessera/core/detail/no_copy.h"
#include "tessera/dtensor/detail/random_parts.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The key of counter-based random numbers: Philox4x32-10 (Salmon et al., 2011). An element's value
/// depends only on `seed`, `stream` and the row-major index in the global tensor. Values are
/// bit-equal on every mesh, and on CPU and CUDA. Use another `stream` for every parameter and call.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  /// The parts of a fused tensor (nn::FusedLinear). Each row belongs to one part. The random
  /// numbers of a part come from the part's own stream. The parts must exist until the call
  /// returns.
  std::span<const RandomPart> parts{};
};

/// Fills a floating-point tensor, plain or distributed (not Partial), with uniform random numbers
/// in [from, to]. This function, normal_(), trunc_normal_() and bernoulli_() compute in fp64 and
/// round once to the tensor's dtype. Not collective. Thread safe for different tensors. Not
/// recorded by autograd. Throws Error for other dtypes.
void uniform_(const at::Tensor& tensor, double from, double to, RandomKey key);
/// Fills a tensor with normal random numbers, by inverse CDF (algorithm AS241). See uniform_().
void normal_(const at::Tensor& tensor, double mean, double std, RandomKey key);
/// Fills a tensor with random numbers of a normal distribution that is truncated to [low, high], by
/// inverse CDF. See uniform_().
void trunc_normal_(const at::Tensor& tensor, double mean, double std, double low, double high,
                   RandomKey key);
/// Sets each element of a tensor to 1 with probability `p`, and otherwise to 0. See uniform_().
void bernoulli_(const at::Tensor& tensor, double p, RandomKey key);

/// Sets the seed of the random operators of at:: on this thread and in backwards of this thread.
/// The seed applies to distributed tensors, and to plain tensors in the forward of a parallelized
/// module (docs/random.md). Not collective, but every rank must set the same seed and make the same
/// calls. The ranks then get shards of the same global tensors on every mesh.
///
/// A generator that is passed to an operator replaces the seed, and must be equal on every rank.
/// libtorch's own generators are not changed.
void manual_seed(std::uint64_t seed);

/// Returns the state of this rank's random operators: the seed and the number of calls. After
/// set_random_state(state), random operators repeat the numbers drawn since `state` was returned.
RandomState random_state();
/// Sets the state of this rank's random operators to a result of random_state(). Random operators
/// then repeat the numbers that were drawn after random_state() was called.
void set_random_state(RandomState state);

namespace detail {
class RandomRegionScope;
}

/// While a BatchPart exists, random operators treat this thread's tensors as part `index` of
/// `count` equal parts along dimension 0. Data-parallel ranks then draw the numbers of a single
/// rank with the full batch. Plain tensors also use the seed of manual_seed(). An inner scope
/// replaces an outer scope.
class BatchPart : tessera::detail::NoCopy {
 public:
  BatchPart(std::int64_t index, std::int64_t count);
  ~BatchPart();

 private:
  std::unique_ptr<detail::RandomRegionScope> scope_;
};

}  // namespace tessera
TESSERA_API_END
