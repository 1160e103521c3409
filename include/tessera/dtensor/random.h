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

/// The key of counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers:
/// as easy as 1, 2, 3", 2011) with the index of an element in the global tensor as the counter. The
/// value of an element depends only on `seed`, `stream` and the element's row-major index in the
/// global tensor. The values are therefore bit-equal on every mesh, and on CPU and CUDA. Use a
/// different `stream` for every parameter and every call.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  /// The parts (separate weights) of a fused tensor (nn::FusedLinear). Each row of the tensor
  /// belongs to one part. Random numbers of a part come from the part's own stream instead of
  /// `stream`. The parts must exist until the call that gets the key returns.
  std::span<const RandomPart> parts{};
};

/// Fills a floating-point tensor, plain or distributed (not Partial), with uniform random numbers
/// in [from, to]. This function, normal_(), trunc_normal_() and bernoulli_() compute values in fp64
/// and round once to the tensor's dtype. These functions are not collective, are thread safe for
/// different tensors, are not recorded by autograd, and throw Error for a tensor that is not
/// floating-point.
void uniform_(const at::Tensor& tensor, double from, double to, RandomKey key);
/// Fills a tensor with normal random numbers, by inverse CDF (algorithm AS241). See uniform_().
void normal_(const at::Tensor& tensor, double mean, double std, RandomKey key);
/// Fills a tensor with random numbers of a normal distribution that is truncated to [low, high], by
/// inverse CDF. See uniform_().
void trunc_normal_(const at::Tensor& tensor, double mean, double std, double low, double high,
                   RandomKey key);
/// Sets each element of a tensor to 1 with probability `p`, and otherwise to 0. See uniform_().
void bernoulli_(const at::Tensor& tensor, double p, RandomKey key);

/// Sets the seed of the random operators of at:: (uniform_, normal_, dropout, rand_like,
/// multinomial, ...) on this thread and on the autograd threads that run its backward. The seed
/// applies to distributed tensors, and to plain tensors in the forward of a module with fully_shard
/// or parallelize_module (docs/random.md). Not collective, but every rank must set the same seed
/// and make the same calls: then the ranks get shards of the same global tensors, on every mesh.
/// The common operators draw each number by its element's index in the global tensor, without
/// communication, and give bit-equal numbers on CPU and CUDA. All other random operators gather
/// their tensors, and give bit-equal numbers on devices of the same model. A generator that the
/// caller passes to an operator is used instead of the seed; every rank must pass an equal
/// generator. libtorch's own generators are not changed.
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

/// While a BatchPart exists, dropout and the random operators of at:: treat the tensors of this
/// thread as part `index` of `count` equal parts along dimension 0. Data-parallel ranks then draw
/// the numbers that a single rank draws for the full batch. BatchPart(0, 1) declares that the
/// tensors are the full batch. In the scope, plain tensors also use the seed of manual_seed(). The
/// forward of a module with fully_shard needs a BatchPart only if the library cannot derive from
/// the input which rows of the batch this rank has. An inner scope replaces an outer scope.
class BatchPart : tessera::detail::NoCopy {
 public:
  BatchPart(std::int64_t index, std::int64_t count);
  ~BatchPart();

 private:
  std::unique_ptr<detail::RandomRegionScope> scope_;
};

}  // namespace tessera
TESSERA_API_END
