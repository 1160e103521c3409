#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Counter-based random numbers (Philox4x32-10) indexed by global element: the value of an element
/// depends on `seed`, `stream` and its row-major index in the global tensor only, so the result is
/// bit-equal on every mesh, and on CPU and CUDA. `stream` tells tensors apart: give every parameter
/// and every call its own.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};

/// A stable stream number for a name (FNV-1a), for example a parameter's FQN.
std::uint64_t stream_of(const char* name);
/// The `index`-th of many streams below `stream`, for example one a call.
std::uint64_t substream(std::uint64_t stream, std::uint64_t index);

// Each fills a floating-point tensor, plain or distributed (not partial), with values computed in
// fp64 and rounded once to the tensor's type. Not collective. Gradient: none; autograd does not see
// the write.

/// Uniform in [from, to].
void uniform_(const at::Tensor& tensor, double from, double to, RandomKey key);
/// Normal, by inverse CDF (Wichura's AS241).
void normal_(const at::Tensor& tensor, double mean, double std, RandomKey key);
/// Normal cut to [low, high], by inverse CDF.
void trunc_normal_(const at::Tensor& tensor, double mean, double std, double low, double high,
                   RandomKey key);
/// 1 with probability `p`, else 0.
void bernoulli_(const at::Tensor& tensor, double p, RandomKey key);
/// `x` with each element zeroed with probability `p` and the others multiplied by 1/(1-p); same
/// layout. `first_element` is added to every element's index. No gradient: see nn::dropout.
at::Tensor apply_dropout(const at::Tensor& x, double p, RandomKey key, std::int64_t first_element);

/// While it lives, on this thread: tensors are part `index` of `count` equal parts, along dimension
/// 0, of something larger that no mesh shows, as activations that live on a tp mesh are of the
/// batch that data parallelism splits. Random numbers of activations are then drawn by the place in
/// the whole. Scopes replace one another.
class BatchPart {
 public:
  BatchPart(std::int64_t index, std::int64_t count);
  ~BatchPart();
  BatchPart(const BatchPart&) = delete;
  BatchPart& operator=(const BatchPart&) = delete;

  /// Index in the whole of the first element of a tensor of `numel` elements; 0 outside a scope.
  static std::int64_t first_element(std::int64_t numel);

 private:
  std::int64_t outer_;
};

}  // namespace tessera
